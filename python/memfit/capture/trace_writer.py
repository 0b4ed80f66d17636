"""The document of a trace: what the engine reads, whoever recorded the step.

Responsible for its field names, which are those of ``crates/memfit-engine/src/trace/mod.rs``, for
what a field says where a source knows nothing of it, and for interning strings and devices. Not
responsible for where a step comes from: :mod:`memfit.capture.as_trace` feeds a recording,
``memfit.run.compiled.as_trace`` a joint graph. Nor for what makes a trace valid: the engine checks.

Rows are numbered in the order they are added, and so are strings and devices. A position lies
between ops: position 3 is just before op 3.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NotRequired, TypedDict

import torch


class Meta(TypedDict):
    """Where a trace comes from. What its source cannot know is left out.

    Attributes:
        target: What was captured, as the user named it.
        torch_version: ``torch.__version__``.
        device_kind: ``cpu`` or ``cuda``.
        optimizer: Class name of the optimizer, empty without one.
        batch: Batch size; 0 when there is none.
        training: Whether backward ran.
        captured: ``fake``, ``real`` or ``joint``.
        probe_threads: Threads that the workspace probes ran with; 0 when they did not run.
        fused_optimizer_refusal: Why the optimizer cannot run inside backward.
        per_parameter_refusal: Why it cannot run parameter by parameter after backward.
        eight_bit_refusal: Why the optimizer's state has no form in 8 bits.
        half_parameters: Whether parameters were narrowed for this recording.
        micro_batch_refusal: Why the batch cannot be cut for reasons that its ops do not show.
        offloaded_parameters_refusal: Why parameters cannot be offloaded with this torch.
        loss_reduction: ``mean``, ``sum``, ``token_mean``, or empty when it was not recognised.
        fixed_parameters: Allocations of parameters in memory that cannot be let go; ascending.
        inference: What a forward of inference returns, and whether it is a call of the model alone.
        checkpoints: How many checkpoints of torch's the model runs, and why they may not be undone.
        notes: Things the reader should know.
    """

    target: str
    torch_version: str
    device_kind: str
    optimizer: str
    batch: int
    training: bool
    captured: str
    probe_threads: NotRequired[int]
    fused_optimizer_refusal: NotRequired[str | None]
    per_parameter_refusal: NotRequired[str | None]
    eight_bit_refusal: NotRequired[str | None]
    half_parameters: NotRequired[bool]
    micro_batch_refusal: NotRequired[str | None]
    offloaded_parameters_refusal: NotRequired[str | None]
    loss_reduction: NotRequired[str]
    fixed_parameters: NotRequired[list[int]]
    inference: NotRequired[dict[str, Any] | None]
    checkpoints: NotRequired[dict[str, Any] | None]
    notes: list[str]


class TraceWriter:
    """Collects the rows of a trace."""

    def __init__(self) -> None:
        """Begin a trace in which nothing has happened."""
        self._strings = {"": 0}
        self._devices: dict[str, int] = {}
        self._allocations: list[dict[str, Any]] = []
        self._values: list[dict[str, Any]] = []
        self._ops: list[dict[str, Any]] = []
        self._saved: list[dict[str, Any]] = []
        self._regions: list[dict[str, Any]] = []
        self._updates: list[dict[str, Any]] = []

    def device(self, name: str) -> int:
        """The number of a device.

        Args:
            name: ``cpu``, ``cuda:0``.
        """
        return self._devices.setdefault(name, len(self._devices))

    def allocation(
        self,
        size_bytes: int,
        *,
        device: int,
        category: str,
        producer: int | None,
        natural: Sequence[Sequence[int]],
        name: str = "",
    ) -> None:
        """Add a storage.

        Args:
            size_bytes: Size asked for.
            device: Number of its device.
            category: What it is for.
            producer: Op that created it; ``None`` for what existed before the step.
            natural: Ranges ``[start, end)`` in which something other than a saved tensor holds it.
            name: Name of the parameter or buffer or batch entry.
        """
        row = _allocation(size_bytes, device, category, producer, natural, self._string(name))
        self._allocations.append(row)

    def value(
        self,
        allocation: int,
        *,
        version: int = 0,
        offset: int = 0,
        shape: Iterable[int],
        stride: Iterable[int] = (),
        dtype: torch.dtype,
    ) -> None:
        """Add a tensor as ops see it.

        Args:
            allocation: Its storage.
            version: How many in-place writes the storage had seen in this step.
            offset: Elements from the storage's start.
            shape: Sizes, outermost first.
            stride: Strides in elements; empty when unknown.
            dtype: Type of its elements.
        """
        self._values.append(
            {
                "allocation": allocation,
                "version": version,
                "offset": offset,
                "shape": list(shape),
                "stride": list(stride),
                "dtype": self._string(str(dtype).removeprefix("torch.")),
            }
        )

    def op(
        self,
        name: str,
        phase: str,
        *,
        module: str = "",
        source: str = "",
        arguments: str = "",
        node: int | None,
        reads: Iterable[int],
        writes: Iterable[int] = (),
        outputs: Iterable[int],
        flops: int,
        moved_bytes: int,
        workspace_bytes: int = 0,
        random: bool = False,
        view: bool,
        replayable: bool,
        shape_only: bool,
    ) -> None:
        """Add an op.

        Args:
            name: Overload name (``aten.addmm.default``).
            phase: ``forward``, ``backward`` or ``optimizer``.
            module: Path of the innermost module.
            source: ``file:line`` that called it.
            arguments: Arguments that are not tensors, as text.
            node: Number of the autograd node that it makes in forward or runs in backward.
            reads: Values read.
            writes: Values written, at their version afterwards.
            outputs: Values returned.
            flops: Floating-point operations.
            moved_bytes: Bytes read plus bytes written, each value once.
            workspace_bytes: Scratch inside the op.
            random: Draws random numbers.
            view: Only makes a view.
            replayable: Can be run again with the same result.
            shape_only: Reads no element of its first tensor.
        """
        self._ops.append(
            {
                "name": self._string(name),
                "phase": phase,
                "module": self._string(module),
                "source": self._string(source),
                "arguments": self._string(arguments),
                "node": node,
                "reads": list(reads),
                "writes": list(writes),
                "outputs": list(outputs),
                "flops": flops,
                "moved_bytes": moved_bytes,
                "workspace_bytes": workspace_bytes,
                "random": random,
                "view": view,
                "replayable": replayable,
                "shape_only": shape_only,
            }
        )

    def saved(self, value: int, *, node: int, pack: int, unpack: int | None, release: int) -> None:
        """Add a tensor that autograd saves.

        Args:
            value: What is saved.
            node: Number of the node that saves it.
            pack: Position at which it is saved.
            unpack: Position at which backward asks for it; ``None`` when it never does.
            release: Position at which the node lets go.
        """
        self._saved.append(
            {"value": value, "node": node, "pack": pack, "unpack": unpack, "release": release}
        )

    def region(self, module: str, class_name: str, *, call: int, start: int, end: int) -> None:
        """Add a call of a module.

        Args:
            module: Path of the module; empty for the root.
            class_name: Name of its class.
            call: How many times it had been entered before in the step.
            start: First op of the call.
            end: One past its last op.
        """
        self._regions.append(
            {
                "module": self._string(module),
                "class": self._string(class_name),
                "call": call,
                "start": start,
                "end": end,
            }
        )

    def update(
        self,
        parameter: int,
        gradient: int,
        *,
        ready: int,
        temporary_bytes: int,
        moved_bytes: int,
        state: Iterable[int],
    ) -> None:
        """Add the optimizer's update of one parameter.

        Args:
            parameter: Allocation of the parameter.
            gradient: Allocation of its gradient.
            ready: Position at which the gradient is complete.
            temporary_bytes: Peak of temporaries while it is updated alone.
            moved_bytes: Bytes moved by that update.
            state: Allocations of the optimizer's state for this parameter alone.
        """
        self._updates.append(
            {
                "parameter": parameter,
                "gradient": gradient,
                "ready": ready,
                "temporary_bytes": temporary_bytes,
                "moved_bytes": moved_bytes,
                "state": list(state),
            }
        )

    def trace(self, meta: Meta) -> dict[str, Any]:
        """The trace of all that was added, recorded at one batch size.

        Args:
            meta: Where it comes from.
        """
        return {
            "meta": meta,
            "allocations": self._allocations,
            "devices": list(self._devices),
            "values": self._values,
            "ops": self._ops,
            "saved": self._saved,
            "regions": self._regions,
            "updates": self._updates,
            "strings": list(self._strings),
            "couplings": None,
        }

    def _string(self, text: str) -> int:
        return self._strings.setdefault(text, len(self._strings))


def with_held(
    trace: Mapping[str, Any],
    name: str,
    held: Iterable[tuple[int, int]],
    category: str = "input",
) -> dict[str, Any]:
    """A trace with memory that is there when the step begins and that no op touches.

    Args:
        trace: The trace; it stays as it is.
        name: Name of that memory.
        held: Sizes in bytes on the first device, each with the position at which it goes.
        category: What the memory is counted as.
    """
    strings = [*trace["strings"], name]
    rows = [
        _allocation(size_bytes, 0, category, None, [[0, end]], len(strings) - 1)
        for size_bytes, end in held
    ]
    return {**trace, "allocations": [*trace["allocations"], *rows], "strings": strings}


def _allocation(
    size_bytes: int,
    device: int,
    category: str,
    producer: int | None,
    natural: Sequence[Sequence[int]],
    name: int,
) -> dict[str, Any]:
    return {
        "bytes": size_bytes,
        "device": device,
        "category": category,
        "producer": producer,
        "natural": natural,
        "name": name,
        "law": None,
    }
