"""Techniques that the plans of one loop do without, since something in the script rules them out.

Responsible for which ones they are, from when on and why, and for having plans that use one made
again. Not responsible for what a user forbids (:class:`memfit.options.Options`) nor for making
plans (:mod:`memfit.run.script.loop`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from memfit.run.script.planned_step import PlannedStep
from memfit.run.script.recorded_step import RecordedStep
from memfit.run.script.step_plans import StepPlans

_PARAMETERS = "offload_parameters"
_FUSE = "fuse_optimizer"
_RIVAL = "the optimizer stays out of backward: there is another one, which has not stepped yet"


class ForbiddenTechniques:
    """Techniques that the plans of one loop do without."""

    def __init__(
        self,
        plans: StepPlans,
        plan_again: Callable[[Sequence[PlannedStep], str], None],
        *,
        are_parameters_lent: bool,
    ) -> None:
        """Forbid nothing but what cannot be for this model.

        Args:
            plans: The loop's plans.
            plan_again: Makes those of some steps again; told why, where the user is to know it.
            are_parameters_lent: Whether the memory of parameters belongs to something else.
        """
        self._plans = plans
        self._plan_again = plan_again
        self._kinds = [_PARAMETERS] if are_parameters_lent else []
        self._next: tuple[str, str] | None = None

    @property
    def may_offload_parameters(self) -> bool:
        """Whether parameters may be offloaded."""
        return _PARAMETERS not in self._kinds

    @property
    def plans_offload_parameters(self) -> bool:
        """Whether a plan offloads parameters, and none had to do without it so far."""
        plans = (it for step in self._plans for it in (step, step.lowest) if it is not None)
        kinds = {action.kind for it in plans for action in it.plan.actions}
        return self.may_offload_parameters and _PARAMETERS in kinds

    def keep_parameters(self, reason: str) -> None:
        """Offload no parameters from the next pass on.

        Args:
            reason: Why, as a clause.
        """
        self._next = (_PARAMETERS, f"parameters stay in memory: {reason}")

    def keep_updates_out_of_backward(self, reason: str = "") -> None:
        """Fuse no optimizer into backward from the next pass on.

        Args:
            reason: Why, as a clause; empty where the user has been told.
        """
        note = f"the optimizer stays out of backward: {reason}" if reason else ""
        self._next = (_FUSE, note)

    def pass_begins(self, *, has_rival: bool) -> None:
        """Have plans made again for what has turned out since the pass before.

        Args:
            has_rival: Whether an optimizer that has never stepped may be the one that steps next.
        """
        if has_rival and self._plans and _FUSE not in self._kinds:
            self._forbid(_FUSE, _RIVAL)
        forbidden, self._next = self._next, None
        if forbidden is not None:
            self._forbid(*forbidden)

    def views_live_on(self, names: Sequence[str]) -> None:
        """Plan for parameters in memory once views live on of some that were offloaded.

        What holds a view may read it at any moment, and nothing tells of that.

        Args:
            names: Names of those parameters; empty where there are none.
        """
        if names:
            self._forbid(
                _PARAMETERS,
                f"parameters stay in memory: a view of `{names[0]}` lives on, in a variable or in "
                "the graph of a value that the script keeps",
            )

    def apply_to(self, step: RecordedStep) -> None:
        """Have a step that was just recorded planned without them."""
        for kind in self._kinds:
            step.forbid(kind)

    def _forbid(self, kind: str, note: str) -> None:
        self._kinds.append(kind)
        changed = self._plans.forbid(kind)
        if changed:
            self._plan_again(changed, note)
