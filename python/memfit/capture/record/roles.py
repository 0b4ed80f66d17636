"""What the allocations of a recorded step are for.

Roles bind only when the step has ended: a gradient is one because a parameter came to hold it. Not
responsible for finding them out (:mod:`memfit.capture.record.step`).
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Update:
    """What is known about one trainable parameter.

    Attributes:
        parameter: Allocation of the parameter.
        gradient: Allocation of its gradient.
        ready: Position at which the gradient is complete.
        temporary_bytes: Peak of temporaries while the optimizer updates it alone.
        moved_bytes: Bytes moved by that update.
        state: Allocations of the optimizer's state for this parameter alone.
    """

    parameter: int
    gradient: int
    ready: int
    temporary_bytes: int = 0
    moved_bytes: int = 0
    state: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Roles:
    """Which allocation is what, and what each is called.

    Attributes:
        parameters: Allocations of parameters.
        module_buffers: Allocations of module buffers.
        inputs: Allocations of batch tensors.
        optimizer_state: Allocations of optimizer state.
        gradients: Allocations of gradients.
        names: Name of an allocation that has one.
        fixed: Allocations of parameters in memory that cannot be let go.
        updates: Trainable parameters in the order their gradients became ready.
        loss: Value of the loss, or ``None``.
    """

    parameters: set[int] = field(default_factory=set)
    module_buffers: set[int] = field(default_factory=set)
    inputs: set[int] = field(default_factory=set)
    optimizer_state: set[int] = field(default_factory=set)
    gradients: set[int] = field(default_factory=set)
    names: dict[int, str] = field(default_factory=dict)
    fixed: set[int] = field(default_factory=set)
    updates: list[Update] = field(default_factory=list)
    loss: int | None = None

    def category(self, allocation: int, *, existed: bool, packed: bool) -> str:
        """The category of an allocation.

        Args:
            allocation: The allocation.
            existed: Whether it was there before the step.
            packed: Whether autograd saved it.
        """
        members_of = (
            (self.parameters, "parameter"),
            (self.module_buffers, "module_buffer"),
            (self.optimizer_state, "optimizer_state"),
            (self.inputs, "input"),
            (self.gradients, "gradient"),
        )
        for members, category in members_of:
            if allocation in members:
                return category
        if existed:
            return "input"
        return "activation" if packed else "temporary"
