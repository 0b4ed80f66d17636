"""A workload that runs compiled, by memfit's partition.

Responsible for :class:`CompiledFitted`, the compiled counterpart of
:class:`~memfit.run.fitted.Fitted`: the loss goes through stock Inductor with memfit's partitioner,
and the first steps are measured; where Inductor takes more than predicted, the graphs are cut again
for less, and in the end the step runs eager; where it takes less, they are cut again for more. Not
responsible for planning (:mod:`memfit.run.compiled.fit`).
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor
from torch._inductor import config as inductor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from memfit import _native, answers
from memfit.apply.executor import Executor
from memfit.apply.offload.tiers import open_tier
from memfit.errors import NotCompiledWarning, UsageError
from memfit.measure import static_tensors
from memfit.measure.peak import storage_bytes
from memfit.run.compiled import log_calls
from memfit.run.compiled.partitioner import Partitioner
from memfit.run.compiled.recording import own_code
from memfit.run.compiled.transfer_ops import Transit, moving
from memfit.run.fitted import Fitted, Report, shape_of
from memfit.schema import CompiledGraph
from memfit.tensors.garbage import collected_before
from memfit.track import cpu
from memfit.workload import Workload

MAX_CORRECTIONS = 3
"""Times the graphs are cut again because a step took more than the budget."""

_CAUTION = 0.01
"""Part of the budget that is left free besides, once more at each correction after the first: the
graphs were cut for what was measured, and then took more than that."""

_WORTH_COMPILING = 0.01
"""Part of the step's nominal time that a partition for more must save."""

_SPARE = 0.01
"""Part of the budget that a step must leave before a partition for more is looked for."""

_WITHOUT_RAISING_PEAK = {
    name: 0.0
    for name in ("fusion_memory_timeline_peak_memory_pct_threshold",)
    if hasattr(inductor, name)
}
"""Options that keep Inductor from fusing what runs again for one block with what runs for another,
because both read one small tensor: all of it would then run at once, as early as the first."""

_MEASURED_STEP = 2
"""Step after compiling that is measured: by then the optimizer has its state."""


@dataclass(slots=True, frozen=True)
class CompiledReport(Report):
    """What the compiled steps so far did.

    Attributes:
        graphs: The joint graphs, in the order of forward.
        corrections: Times the graphs were cut again for less, because a step was measured above the
            budget.
        loosened: Whether the graphs run as they were cut again for more, because a step was
            measured below the budget.
        measured_peak_bytes: Peak of the step that was measured last; 0 before that, and on devices
            where nothing is measured.
    """

    graphs: tuple[CompiledGraph, ...] = ()
    corrections: int = 0
    loosened: bool = False
    measured_peak_bytes: int = 0


@dataclass(slots=True, frozen=True)
class CompiledPlan:
    """A plan of a compiled step.

    Attributes:
        answer: The plan, for people and programs.
        partitioner: Cuts the graphs.
        graphs: What it does to each.
        budget_bytes: Most bytes of the step.
        beyond_bytes: What Inductor is taken to need beyond what is told of its graphs; negative
            where it needs less.
        added_seconds: Nominal time of what runs again, and what transfers add.
        step_seconds: Nominal time of the graphs with everything kept.
        around: Actions of the engine's plans that run around the graphs.
        offer: The place that saved tensors go to, as an ``Offer`` of the engine.
        window_bytes: Most bytes of them on their way out at a time.
    """

    answer: answers.CompiledPlan
    partitioner: Partitioner
    graphs: tuple[CompiledGraph, ...]
    budget_bytes: int
    beyond_bytes: int
    added_seconds: float
    step_seconds: float
    around: Sequence[Mapping[str, Any]] = ()
    offer: Mapping[str, Any] | None = None
    window_bytes: int = 0

    @property
    def peak_bytes(self) -> int:
        """Predicted peak of the step, the optimizer's included."""
        return self.answer.planned.predicted_peak_bytes

    @property
    def told_bytes(self) -> int:
        """What is told of the graphs, before what was measured is added."""
        return max(graph.predicted_peak_bytes for graph in self.graphs) - self.beyond_bytes

    @property
    def is_tight(self) -> bool:
        """Whether the graphs add so much that less of it could be worth compiling."""
        return self.added_seconds > _WORTH_COMPILING * self.step_seconds

    def is_worth(self, other: CompiledPlan) -> bool:
        """Whether a step by this plan saves so much time over the other's that compiling pays."""
        saved = other.added_seconds - self.added_seconds
        return saved > _WORTH_COMPILING * self.step_seconds


class CompiledFitted(Fitted):
    """A workload that runs compiled, inside a budget."""

    def __init__(
        self,
        workload: Workload,
        plan: CompiledPlan,
        replan: Callable[[int], CompiledPlan | None],
        eager: Callable[[Optimizer | None], Fitted] | None = None,
    ) -> None:
        """Apply a plan to a workload.

        Args:
            workload: The workload the plan was made for.
            plan: The plan.
            replan: Plans for the same budget, of graphs that take so many bytes beyond what is told
                of them; the plan of least peak where none is reached that way; ``None`` where that
                does not reach it by what is told of it either.
            eager: Fits the step eager, for the optimizer given, where compiled code turns out not
                to keep the budget; ``None`` where no eager plan does either.
        """
        super().__init__(workload, {"actions": plan.around})
        self._eager = eager
        self._instead: Fitted | None = None
        self._cut_for = replan
        self._corrections = 0
        self._tight: CompiledPlan | None = None
        """The plan that kept the budget, once another was made for more."""
        self._measured_bytes = 0
        self._transit: Transit | None = None
        self._adopt(plan)

    def _adopt(self, plan: CompiledPlan) -> None:
        self._steps_of_plan = 0
        self._compiled_plan = plan
        options: Any = {"custom_partitioner_fn": plan.partitioner}
        if any(graph.recomputed_ops for graph in plan.graphs):
            options |= _WITHOUT_RAISING_PEAK
        self._transit = None
        if plan.offer is not None:
            folder = plan.offer.get("folder", "")
            self._transit = Transit(open_tier(plan.offer["tier"], plan.window_bytes, folder))
        loss = self.workload.loss
        assert loss is not None, "only training steps are compiled"
        self._compiled: Callable[..., Tensor] = torch.compile(own_code(loss), options=options)

    @property
    def plan(self) -> answers.Plan | answers.CompiledPlan:
        """The plan of the step, compiled unless that did not keep the budget."""
        return self._compiled_plan.answer if self._instead is None else self._instead.plan

    @property
    def has_settled(self) -> bool:
        """Whether the next step compiles nothing and is not measured to be cut again."""
        return self._instead is not None or self._steps_of_plan >= _MEASURED_STEP

    def close(self) -> None:
        """As :meth:`Fitted.close`."""
        if self._instead is not None:
            self._instead.close()
        super().close()

    def step(self, batch: Any = None) -> Any:
        """Run one whole step; see :meth:`Fitted.step`.

        The second step after compiling is measured, on the CPU; where it took more than the budget,
        or so much less that time can be saved, the graphs are cut again and the next step compiles.

        Args:
            batch: The batch; the workload's own by default.

        Returns:
            The loss, detached.
        """
        if self._instead is not None:
            return self._instead.step(batch)
        with moving(self._transit):
            return self._step(batch)

    def _step(self, batch: Any) -> Any:
        usual = batch is None or shape_of(batch) == shape_of(self.workload.batch)
        if not usual or self._steps_of_plan != 1 or not self._counts():
            result = super().step(batch)
        else:
            result = self._measured_step(batch)
        self._steps_of_plan += usual
        if self._steps_of_plan == _MEASURED_STEP and self._measured_bytes > 0:
            self._learn()
        return result

    def _measured_step(self, batch: Any) -> Any:
        static = static_tensors(self.workload, self.optimizer)
        static_bytes = storage_bytes([*static, *_tensors(batch)])
        with collected_before():
            before, window = _native.counted_bytes(), cpu.Window()
            result = super().step(batch)
            reading = window.close()
        if reading is not None:
            self._measured_bytes = static_bytes + reading.peak_bytes - before
        return result

    def _counts(self) -> bool:
        """Whether what torch allocates can be counted here: on the CPU, by memfit's hooks."""
        devices = {p.device.type for p in self.workload.model.parameters()}
        return devices == {"cpu"} and cpu.start() is None

    def _learn(self) -> None:
        """Cut the graphs again by what the step was measured to take.

        Inductor fuses and orders as it sees fit, so what it takes differs from what its graphs say;
        but by much the same for partitions that are alike.
        """
        plan, measured = self._compiled_plan, self._measured_bytes
        beyond = plan.beyond_bytes
        # Below the peak of an optimizer that takes more, the graphs' own is not known.
        if measured > plan.peak_bytes or plan.told_bytes + beyond == plan.peak_bytes:
            beyond = measured - plan.told_bytes
        spare = plan.budget_bytes - measured
        if spare < 0:
            self._correct(beyond)
        elif self._tight is None and plan.is_tight and spare > _SPARE * plan.budget_bytes:
            looser = self._cut_for(beyond)
            if looser is not None and looser.is_worth(plan):
                self._tight = plan
                self._cut_again(looser)

    def _correct(self, beyond_bytes: int) -> None:
        """Cut the graphs again for less; as they were, if they had been cut for more."""
        plan, tight, tighter = self._compiled_plan, self._tight, None
        if self._corrections < MAX_CORRECTIONS:
            caution = int(self._corrections * _CAUTION * plan.budget_bytes)
            tighter = self._cut_for(beyond_bytes + caution)
            if tighter is not None and tighter.told_bytes >= plan.told_bytes:
                tighter = None
        if tight not in (None, plan) and (tighter is None or not tighter.is_worth(tight)):
            tighter = tight
        if tighter is not None:
            self._corrections += 1
            self._cut_again(tighter)
            return
        over = _native.bytes_text(self._measured_bytes - plan.budget_bytes)
        self._not_compiled = (
            f"the compiled step takes {_native.bytes_text(self._measured_bytes)}, {over} above its "
            "budget, and no tighter partition stays within it"
        )
        if self._eager is None:
            message = f"{self._not_compiled}; nor is there an eager plan that does: it goes on so"
        else:
            message = f"{self._not_compiled}: from here on the step runs eager"
            self._instead = self._eager(self.optimizer)
        warnings.warn(message, NotCompiledWarning, stacklevel=3)

    def _cut_again(self, plan: CompiledPlan) -> None:
        if plan.around != self._compiled_plan.around:
            self.follow({"actions": plan.around})
        self._adopt(plan)

    @contextlib.contextmanager
    def forward(self, batch: Any = None) -> Iterator[None]:
        """Refuse: a compiled plan runs whole steps.

        Args:
            batch: Not looked at.

        Raises:
            UsageError: Always.
        """
        del batch
        raise UsageError(
            "a compiled plan runs whole steps\n"
            "hint: call `step`, or fit without `compile=True` to keep your own loop"
        )
        yield

    def report(self) -> CompiledReport:
        """What the steps so far did; the graphs are those of the compiled ones."""
        mine = super().report()
        latest = mine if self._instead is None else self._instead.report()
        plain = {f.name: getattr(latest, f.name) for f in fields(latest)}
        plain["not_compiled"] = mine.not_compiled
        if self._instead is None:
            plain["replayed_ops"] = sum(g.recomputed_ops for g in self._compiled_plan.graphs)
            self._add_transfers(plain)
        else:
            plain["steps"] += mine.steps
        return CompiledReport(
            **plain,
            graphs=self._compiled_plan.graphs,
            corrections=self._corrections,
            loosened=self._tight not in (None, self._compiled_plan),
            measured_peak_bytes=self._measured_bytes,
        )

    def _add_transfers(self, figures: dict[str, Any]) -> None:
        """Add what the graphs moved to what the actions around them did."""
        if self._transit is None:
            return
        moved = self._transit.moved()
        figures["offloaded_tensors"] += self._transit.sent
        figures["offloaded_bytes_written"] += moved.bytes_written
        figures["offloaded_bytes_read"] += moved.bytes_read
        figures["offload_seconds_waited"] += moved.seconds_waited

    def _loss(self, executor: Executor, batch: Any) -> Tensor:
        del executor
        with log_calls.left_out(), self.workload.autocasting():
            return self._compiled(self.workload.model, batch)


def _tensors(batch: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]
