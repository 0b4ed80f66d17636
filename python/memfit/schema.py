"""The answers of the engine as Python has them, made from its JSON Schema: do not edit.

Written by ``tests/schema/python_types.py --write``; a test compares it with the engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, TypeAlias

from memfit.records import record


@record
class RematAction:
    """Drop activations and recompute them in backward.

    Attributes:
        kind: Which technique.
        promise: Its promise.
        count: How many: allocations that are recomputed, let go, offloaded or shrunk; parameters
            that are fused or offloaded, or whose state is offloaded or held in 8 bits; slices; or
            pieces of the batch.
        bytes: Bytes it keeps from being held at the unplanned peak's worst moment: sizes dropped,
            gradients freed, activations not needed at once.
        remat: What the executor needs.
    """

    kind: Literal["remat"]
    promise: Promise
    count: int
    bytes: int
    remat: Remat


@record
class UnneededSavesAction:
    """Let go of saved activations that backward never needs.

    Attributes:
        kind: Which technique.
        promise: Its promise.
        count: How many: allocations that are recomputed, let go, offloaded or shrunk; parameters
            that are fused or offloaded, or whose state is offloaded or held in 8 bits; slices; or
            pieces of the batch.
        bytes: Bytes it keeps from being held at the unplanned peak's worst moment: sizes dropped,
            gradients freed, activations not needed at once.
        unneeded_saves: What the executor needs.
    """

    kind: Literal["unneeded_saves"]
    promise: Promise
    count: int
    bytes: int
    unneeded_saves: Remat


@record
class FuseOptimizerAction:
    """Run the optimizer step per parameter inside backward and free its gradient.

    Attributes:
        kind: Which technique.
        promise: Its promise.
        count: How many: allocations that are recomputed, let go, offloaded or shrunk; parameters
            that are fused or offloaded, or whose state is offloaded or held in 8 bits; slices; or
            pieces of the batch.
        bytes: Bytes it keeps from being held at the unplanned peak's worst moment: sizes dropped,
            gradients freed, activations not needed at once.
    """

    kind: Literal["fuse_optimizer"]
    promise: Promise
    count: int
    bytes: int


@record
class OneByOneAction:
    """Update one parameter at a time, after backward.

    Attributes:
        kind: Which technique.
        promise: Its promise.
        count: How many: allocations that are recomputed, let go, offloaded or shrunk; parameters
            that are fused or offloaded, or whose state is offloaded or held in 8 bits; slices; or
            pieces of the batch.
        bytes: Bytes it keeps from being held at the unplanned peak's worst moment: sizes dropped,
            gradients freed, activations not needed at once.
    """

    kind: Literal["one_by_one"]
    promise: Promise
    count: int
    bytes: int


@record
class MicroBatchAction:
    """Split the batch and accumulate gradients.

    Attributes:
        kind: Which technique.
        promise: Its promise.
        count: How many: allocations that are recomputed, let go, offloaded or shrunk; parameters
            that are fused or offloaded, or whose state is offloaded or held in 8 bits; slices; or
            pieces of the batch.
        bytes: Bytes it keeps from being held at the unplanned peak's worst moment: sizes dropped,
            gradients freed, activations not needed at once.
        micro_batch: What the executor needs.
    """

    kind: Literal["micro_batch"]
    promise: Promise
    count: int
    bytes: int
    micro_batch: MicroBatch | None


@record
class AllocatorSettingsAction:
    """Set up the caching allocator against fragmentation, as in ``PYTORCH_CUDA_ALLOC_CONF``.

    Attributes:
        kind: Which technique.
        promise: Its promise.
        count: How many: allocations that are recomputed, let go, offloaded or shrunk; parameters
            that are fused or offloaded, or whose state is offloaded or held in 8 bits; slices; or
            pieces of the batch.
        bytes: Bytes it keeps from being held at the unplanned peak's worst moment: sizes dropped,
            gradients freed, activations not needed at once.
        settings: What the executor needs.
    """

    kind: Literal["allocator_settings"]
    promise: Promise
    count: int
    bytes: int
    settings: str


@record
class OffloadAction:
    """Offload saved activations in forward and fetch them in backward.

    Attributes:
        kind: Which technique.
        promise: Its promise.
        count: How many: allocations that are recomputed, let go, offloaded or shrunk; parameters
            that are fused or offloaded, or whose state is offloaded or held in 8 bits; slices; or
            pieces of the batch.
        bytes: Bytes it keeps from being held at the unplanned peak's worst moment: sizes dropped,
            gradients freed, activations not needed at once.
        offload: What the executor needs.
    """

    kind: Literal["offload"]
    promise: Promise
    count: int
    bytes: int
    offload: Offload


@record
class ShrinkAction:
    """Hold saved activations in fewer bits until backward.

    Attributes:
        kind: Which technique.
        promise: Its promise.
        count: How many: allocations that are recomputed, let go, offloaded or shrunk; parameters
            that are fused or offloaded, or whose state is offloaded or held in 8 bits; slices; or
            pieces of the batch.
        bytes: Bytes it keeps from being held at the unplanned peak's worst moment: sizes dropped,
            gradients freed, activations not needed at once.
        shrink: What the executor needs.
    """

    kind: Literal["shrink"]
    promise: Promise
    count: int
    bytes: int
    shrink: Shrink


@record
class OffloadOptimizerAction:
    """Offload the optimizer's state, and fetch it for one parameter at a time.

    Attributes:
        kind: Which technique.
        promise: Its promise.
        count: How many: allocations that are recomputed, let go, offloaded or shrunk; parameters
            that are fused or offloaded, or whose state is offloaded or held in 8 bits; slices; or
            pieces of the batch.
        bytes: Bytes it keeps from being held at the unplanned peak's worst moment: sizes dropped,
            gradients freed, activations not needed at once.
        offload_optimizer: What the executor needs.
    """

    kind: Literal["offload_optimizer"]
    promise: Promise
    count: int
    bytes: int
    offload_optimizer: OffloadOptimizer


@record
class OptimizerBitsAction:
    """Hold the optimizer's state in 8 bits, between updates and during them.

    Attributes:
        kind: Which technique.
        promise: Its promise.
        count: How many: allocations that are recomputed, let go, offloaded or shrunk; parameters
            that are fused or offloaded, or whose state is offloaded or held in 8 bits; slices; or
            pieces of the batch.
        bytes: Bytes it keeps from being held at the unplanned peak's worst moment: sizes dropped,
            gradients freed, activations not needed at once.
        optimizer_bits: What the executor needs.
    """

    kind: Literal["optimizer_bits"]
    promise: Promise
    count: int
    bytes: int
    optimizer_bits: OptimizerBits


@record
class OffloadParametersAction:
    """Offload parameters, with a bounded part of them resident.

    Attributes:
        kind: Which technique.
        promise: Its promise.
        count: How many: allocations that are recomputed, let go, offloaded or shrunk; parameters
            that are fused or offloaded, or whose state is offloaded or held in 8 bits; slices; or
            pieces of the batch.
        bytes: Bytes it keeps from being held at the unplanned peak's worst moment: sizes dropped,
            gradients freed, activations not needed at once.
        offload_parameters: What the executor needs.
    """

    kind: Literal["offload_parameters"]
    promise: Promise
    count: int
    bytes: int
    offload_parameters: OffloadParameters


@record
class AutocastAction:
    """Compute matrix products and convolutions in bfloat16.

    Attributes:
        kind: Which technique.
        promise: Its promise.
        count: How many: allocations that are recomputed, let go, offloaded or shrunk; parameters
            that are fused or offloaded, or whose state is offloaded or held in 8 bits; slices; or
            pieces of the batch.
        bytes: Bytes it keeps from being held at the unplanned peak's worst moment: sizes dropped,
            gradients freed, activations not needed at once.
        autocast: What the executor needs.
    """

    kind: Literal["autocast"]
    promise: Promise
    count: int
    bytes: int
    autocast: Autocast


@record
class AutocastFp16Action:
    """Compute them in float16, with a loss scale.

    Attributes:
        kind: Which technique.
        promise: Its promise.
        count: How many: allocations that are recomputed, let go, offloaded or shrunk; parameters
            that are fused or offloaded, or whose state is offloaded or held in 8 bits; slices; or
            pieces of the batch.
        bytes: Bytes it keeps from being held at the unplanned peak's worst moment: sizes dropped,
            gradients freed, activations not needed at once.
        autocast_fp16: What the executor needs.
    """

    kind: Literal["autocast_fp16"]
    promise: Promise
    count: int
    bytes: int
    autocast_fp16: Autocast


@record
class HalfParametersAction:
    """Hold weights and their gradients in 16 bits.

    Attributes:
        kind: Which technique.
        promise: Its promise.
        count: How many: allocations that are recomputed, let go, offloaded or shrunk; parameters
            that are fused or offloaded, or whose state is offloaded or held in 8 bits; slices; or
            pieces of the batch.
        bytes: Bytes it keeps from being held at the unplanned peak's worst moment: sizes dropped,
            gradients freed, activations not needed at once.
        half_parameters: What the executor needs.
    """

    kind: Literal["half_parameters"]
    promise: Promise
    count: int
    bytes: int
    half_parameters: HalfParameters


@record
class Int8WeightsAction:
    """Hold weights of linear layers in 8 bits, for inference.

    Attributes:
        kind: Which technique.
        promise: Its promise.
        count: How many: allocations that are recomputed, let go, offloaded or shrunk; parameters
            that are fused or offloaded, or whose state is offloaded or held in 8 bits; slices; or
            pieces of the batch.
        bytes: Bytes it keeps from being held at the unplanned peak's worst moment: sizes dropped,
            gradients freed, activations not needed at once.
        int8_weights: What the executor needs.
    """

    kind: Literal["int8_weights"]
    promise: Promise
    count: int
    bytes: int
    int8_weights: Int8Weights


@record
class Int8DynamicAction:
    """Compute linear layers in 8 bits, weights among them, for inference.

    Attributes:
        kind: Which technique.
        promise: Its promise.
        count: How many: allocations that are recomputed, let go, offloaded or shrunk; parameters
            that are fused or offloaded, or whose state is offloaded or held in 8 bits; slices; or
            pieces of the batch.
        bytes: Bytes it keeps from being held at the unplanned peak's worst moment: sizes dropped,
            gradients freed, activations not needed at once.
        int8_dynamic: What the executor needs.
    """

    kind: Literal["int8_dynamic"]
    promise: Promise
    count: int
    bytes: int
    int8_dynamic: Int8Weights


@record
class ChunkAction:
    """Compute large losses, wide layers, messages of graphs, images and attention in slices.

    Attributes:
        kind: Which technique.
        promise: Its promise.
        count: How many: allocations that are recomputed, let go, offloaded or shrunk; parameters
            that are fused or offloaded, or whose state is offloaded or held in 8 bits; slices; or
            pieces of the batch.
        bytes: Bytes it keeps from being held at the unplanned peak's worst moment: sizes dropped,
            gradients freed, activations not needed at once.
        chunk: What the executor needs.
    """

    kind: Literal["chunk"]
    promise: Promise
    count: int
    bytes: int
    chunk: Chunk


@record
class NoGraphAction:
    """Keep autograd off in a forward of inference that turns it on.

    Attributes:
        kind: Which technique.
        promise: Its promise.
        count: How many: allocations that are recomputed, let go, offloaded or shrunk; parameters
            that are fused or offloaded, or whose state is offloaded or held in 8 bits; slices; or
            pieces of the batch.
        bytes: Bytes it keeps from being held at the unplanned peak's worst moment: sizes dropped,
            gradients freed, activations not needed at once.
    """

    kind: Literal["no_graph"]
    promise: Promise
    count: int
    bytes: int


@record
class UndoCheckpointsAction:
    """Run the checkpoints of the model as ordinary forwards.

    Attributes:
        kind: Which technique.
        promise: Its promise.
        count: How many: allocations that are recomputed, let go, offloaded or shrunk; parameters
            that are fused or offloaded, or whose state is offloaded or held in 8 bits; slices; or
            pieces of the batch.
        bytes: Bytes it keeps from being held at the unplanned peak's worst moment: sizes dropped,
            gradients freed, activations not needed at once.
    """

    kind: Literal["undo_checkpoints"]
    promise: Promise
    count: int
    bytes: int


Action: TypeAlias = (
    RematAction
    | UnneededSavesAction
    | FuseOptimizerAction
    | OneByOneAction
    | MicroBatchAction
    | AllocatorSettingsAction
    | OffloadAction
    | ShrinkAction
    | OffloadOptimizerAction
    | OptimizerBitsAction
    | OffloadParametersAction
    | AutocastAction
    | AutocastFp16Action
    | HalfParametersAction
    | Int8WeightsAction
    | Int8DynamicAction
    | ChunkAction
    | NoGraphAction
    | UndoCheckpointsAction
)
"""One technique as applied."""


@record
class ActionSummary:
    """One action without what only the executor needs.

    Attributes:
        kind: Which technique.
        promise: Its promise.
        count: As in ``Action``.
        bytes: As in ``Action``.
        resident_bytes: Most bytes of offloaded parameters that are resident at a time; absent for
            other kinds.
    """

    kind: Kind
    promise: Promise
    count: int
    bytes: int
    resident_bytes: int | None = None


@record
class ActiveRegion:
    """A module call that the executor watches.

    Attributes:
        module: Module path; empty for the whole forward.
        call: How many times the module had been entered before in the step.
        start: Index of its first op in forward.
        end: One past its last.
    """

    module: str
    call: int
    start: int
    end: int


Agreement = Literal["bitwise", "equivalent", "different"]
"""The words for agreement, from strict to none.

- ``bitwise``: Every bit is the same.
- ``equivalent``: The same up to rounding.
- ``different``: Not the same.
"""


@record
class Amount:
    """A number of bytes between two bounds, both included.

    Sums and differences are those of the bounds, so what is compared holds for every number that
    the message may have meant. They saturate as ``Bytes`` do.

    Attributes:
        low_bytes: It is no less.
        high_bytes: It is no more.
    """

    low_bytes: int
    high_bytes: int


@record
class Approximation:
    """What approximate gradients are beside the unplanned ones.

    Lengths are Euclidean, over all parameters.

    Attributes:
        gradient_error: Length of the difference over the length of the unplanned gradients; absent
            when it is not a number.
        cosine: Cosine of the angle between the two; absent when it is not a number.
        worst_parameter: The parameter whose gradient is farthest off, among those with a thousandth
            of the whole length or more.
        worst_error: How far, as a part of the length of its own gradient.
        batch_noise: What other examples would change the gradients by, as a part of their length:
            half the difference of the gradients of the batch's halves. Absent where the batch has
            no halves.
        not_finite: Numbers in gradients that are finite unplanned, and not planned.
        update_steps: After how many steps that was; none where updates were not looked at.
        scaled_steps: Steps with a scaled loss that were looked at once the scale fitted; none where
            it is not scaled.
        skipped_steps: How many of them updated nothing, as a gradient was not finite.
        max_error: The bound, as a part of the batch's noise.
        idle_parameters: Parameters that this leaves out, as the loss does not depend on them: their
            gradients are rounding alone, which the optimizer makes full steps of.
        later_loss: The loss after some steps; absent where the batch's examples cannot be drawn.
        rounding_spread: How far parameters are off by chance alone after these steps, as a part of
            how far the unplanned ones moved: two planned runs that round by other draws differ by
            the root of two times that. Absent where nothing is rounded at random.
        update_error: Numbers of parameters after some steps: length of the difference over the
            length of how far the unplanned ones moved. Absent where updates read nothing that was
            rounded, and when it is not a number.
    """

    gradient_error: float | None
    cosine: float | None
    worst_parameter: str
    worst_error: float | None
    batch_noise: float | None
    not_finite: int
    update_steps: int
    scaled_steps: int
    skipped_steps: int
    max_error: float
    idle_parameters: tuple[str, ...] | None = None
    later_loss: LaterLoss | None = None
    rounding_spread: float | None = None
    update_error: float | None = None


@record
class Arena:
    """One block of memory for all that a step allocates.

    Each allocation has an offset known beforehand: no fragmentation. What is there before the step,
    such as parameters, lies outside.

    Attributes:
        bytes: Bytes of the smallest block found, sizes rounded as the device's allocator does.
        lower_bound_bytes: No allocator can do with less: the largest sum of rounded sizes alive at
            once.
    """

    bytes: int
    lower_bound_bytes: int


@record
class Autocast:
    """Forward under ``torch.autocast``.

    Attributes:
        dtype: Element type of what it casts to, ``bfloat16``.
        cache: Whether the narrow copies of parameters are kept to the end of forward, for further
            uses.
        keep: Paths of modules in which nothing is cast.
    """

    dtype: str
    cache: bool
    keep: tuple[str, ...] | None = None


@record
class Bottleneck:
    """What is alive at the moment that stops the peak from going lower.

    Attributes:
        op: The op, ``aten.addmm.default``.
        module: Its module path.
        source: Its source line.
        phase: ``forward``, ``backward`` or ``optimizer``.
        breakdown: Bytes there by category, largest first.
    """

    op: str
    module: str
    source: str
    phase: Phase
    breakdown: tuple[tuple[Category, int], ...]


@record
class Breakdown:
    """Bytes alive at the peak; each list sums to the peak, largest first.

    Attributes:
        category: By category.
        module: By the module that made them.
        source: By the source line that made them.
    """

    category: tuple[Share, ...]
    module: tuple[Share, ...]
    source: tuple[Share, ...]


@record
class Calibration:
    """``memfit calibrate --format json``.

    Attributes:
        path: The file the profile was written to; not in the file itself.
        seconds: Time the measurement took.
        median_spread: Over all measurements: how much longer the median run took than the fastest,
            relative to it.
        profile: What plans use.
    """

    schema_version: int
    kind: str
    path: str
    device_kind: str
    device_name: str
    torch_version: str
    threads: int
    date: str
    seconds: float
    disk: MeasuredDisk
    median_spread: float
    warnings: tuple[str, ...]
    samples: tuple[MeasuredSize, ...]
    profile: DeviceProfile


@record
class CallChunk:
    """A module call that treats the rows of its input one by one, computed for some rows at a time.

    Attributes:
        module: Path of the module.
        dim: The dimension of its input that is cut.
        slices: Number of slices, at most.
        draws: Whether it draws random numbers: each slice draws its own, so a seed gives others
            than without.
        ops: The ops of the whole call in order, which the proof is about: each its name, a space
            and its arguments.
    """

    module: str
    dim: int
    slices: int
    draws: bool
    ops: tuple[str, ...] | None = None


@record
class CallInPieces:
    """What a model's call needs to run on one piece of its batch after the other.

    Attributes:
        cut: The tensors that are cut, by their places among those that it is given; the others go
            to every piece whole. None for those of the batch that the step was planned with.
        draws: For each op that draws random numbers, in order, whether it draws for every item of
            the batch. A piece gets those numbers of the whole draw that are its own.
        loss: The loss, where the call computes it; absent where all that it returns has an entry
            for each item.
    """

    cut: tuple[int, ...]
    draws: tuple[bool, ...]
    loss: LossOfPieces | None = None


Category = Literal[
    "parameter",
    "module_buffer",
    "gradient",
    "optimizer_state",
    "input",
    "activation",
    "temporary",
    "workspace",
]
"""What an allocation is for. Bound when the step has ended, when its role is known.

- ``parameter``: A parameter of the model.
- ``module_buffer``: A buffer of the model, in the sense of ``nn.Module.register_buffer``.
- ``gradient``: The gradient of a parameter.
- ``optimizer_state``: State of the optimizer.
- ``input``: A tensor of the batch.
- ``activation``: Held by autograd between forward and backward.
- ``temporary``: Everything else an op produced.
- ``workspace``: Scratch inside one op, invisible to the dispatcher.
"""

Cause = Literal[
    "live_set",
    "fragmentation",
    "cap",
    "non_torch",
    "pending",
    "private_pools",
    "live_set_or_non_torch",
]
"""What a refusal comes down to.

- ``live_set``: The tensors alive and the request are too much, even for the whole device.
- ``fragmentation``: The bytes were there, not in one piece.
- ``cap``: A limit below the device's memory refused.
- ``non_torch``: Other processes, contexts or libraries hold what was missing.
- ``pending``: Blocks that wait for another stream hold what was missing.
- ``private_pools``: Unused bytes of private pools, as of CUDA graphs, are what was missing.
- ``live_set_or_non_torch``: Too much is alive for what is left of the device, or others hold what
    was missing: which, is not known.
"""


@record
class Chunk:
    """What of a step runs in slices, or for some rows alone; one of these at least.

    Attributes:
        calls: Module calls, in order; none inside another.
        edges: Of training: messages along the edges of a graph, a row for each, that are summed
            into nodes.
        head: Of inference: logits that are computed for those rows alone that are used, as the last
            of each sequence.
        loss: The loss.
        strips: Of inference: large tensors between convolutions, and scores of attention, a strip
            of rows at a time.
    """

    calls: tuple[CallChunk, ...] | None = None
    edges: Edges | None = None
    head: Head | None = None
    loss: LossChunk | None = None
    strips: Strips | None = None


@record
class Comparison:
    """How two runs agree.

    Attributes:
        max_relative_error: Absent when it is not a number.
    """

    agreement: Agreement
    max_relative_error: float | None


@record
class CompiledAction:
    """One technique of a compiled plan.

    Attributes:
        count: Ops recomputed, saved tensors offloaded, or parameters with offloaded state.
    """

    kind: Kind
    promise: Promise
    count: int


@record
class CompiledFacts:
    """What there is to say about a step that ran compiled.

    Attributes:
        reference: What loss and gradients are held against.
        tolerance: Largest relative error of theirs that counts as rounding.
        torch_compile: The same loss under ``torch.compile`` without memfit.
        corrections: Times the graphs were cut again because a step was measured above the budget.
        graphs: The joint graphs, in the order of forward.
    """

    reference: Reference
    tolerance: float
    torch_compile: TorchCompile
    corrections: int
    actions: tuple[CompiledAction, ...]
    graphs: tuple[CompiledGraph, ...]


@record
class CompiledGraph:
    """What was done to one joint graph.

    Attributes:
        ops: Calls in it.
        saved_bytes: What forward hands to backward in memory.
        offloaded_bytes: What it hands over offloaded.
        recomputed_ops: Calls that run again in backward, each as often as it does.
        predicted_peak_bytes: Peak of the step while it runs.
        unplanned_peak_bytes: The same with everything saved.
        reason: Why torch's own partition was used; empty where memfit's was.
    """

    ops: int
    saved_bytes: int
    offloaded_bytes: int
    recomputed_ops: int
    predicted_peak_bytes: int
    unplanned_peak_bytes: int
    reason: str


@record
class Contradiction:
    """Something in the file that contradicts itself.

    Attributes:
        device: The device, when it is about one.
        event: Index of the event in the device's trace, when it is about one.
        what: What is wrong, in one sentence.
    """

    device: int | None
    event: int | None
    what: str


@record
class Counterfactual:
    """What other allocator settings would have done with the same requests.

    Attributes:
        settings: As in ``PYTORCH_CUDA_ALLOC_CONF``.
        peak_reserved_bytes: Peak of reserved bytes.
        oom_avoided: Whether no recorded refusal would have happened; absent when there was none, or
            when a replay under the recorded settings is not refused either.
    """

    settings: str
    peak_reserved_bytes: int
    oom_avoided: bool | None


@record
class Curves:
    """Measured seconds of ops by their work, dispatch included.

    Attributes:
        compute: By kind (``matmul``, ``convolution``, ``convolution_backward``, ``attention``,
            ``attention_backward``) and element type; work in FLOPs. A kind that is missing follows
            ``matmul``, and without that the flat rate.
        memory: By operator without overload (``gelu_backward``); work in bytes moved. Others follow
            ``in_place`` where they make no tensor and ``elementwise`` where they do; without those,
            the flat bandwidth.
    """

    compute: Mapping[str, Mapping[str, Curve]]
    memory: Mapping[str, Curve]


@record
class DeviceExplanation:
    """What happened to one device's memory.

    Attributes:
        index: Index of the device.
        has_history: Whether a history was recorded: two events or more. Without one, ``peak``,
            ``owners`` and ``fragmentation`` are of the moment when the snapshot was taken, and
            nothing is judged but refusals.
        peak: When it held most.
        live_before_recording_bytes: Active bytes before the first event.
        owners: Who owned the allocated bytes at the peak; they sum to it. The largest first.
        fragmentation: The inactive bytes at the peak, or at a refusal.
        oom: Refused requests, in order.
        growth: Stacks that hold more after every step, the fastest first; with an earlier snapshot,
            stacks that hold more than there.
        counterfactuals: What other allocator settings would have done, the best first.
        counterfactual_summary: What they come down to, in a sentence; why there are none, if there
            are none.
        replayed_reserved_bytes: Peak of reserved bytes when replayed under the recorded settings:
            what to compare with.
        growth_summary: What the growth comes down to, in a sentence; that it was not looked for,
            where no steps were found.
        steps: How the steps were found, and how many there are; absent when none were.
        last: When the snapshot was taken.
        end: What becomes of that.
        uncertain_bytes: Block sizes from before recording that nothing in the file tells may make
            the byte counts larger by up to this.
    """

    index: int
    has_history: bool
    peak: Peak
    live_before_recording_bytes: int
    owners: tuple[Owner, ...]
    fragmentation: Fragmentation
    oom: tuple[OutOfMemory, ...]
    growth: tuple[Growth, ...]
    counterfactuals: tuple[Counterfactual, ...]
    counterfactual_summary: str | None
    replayed_reserved_bytes: int | None
    growth_summary: str | None
    steps: StepsFound | None
    last: Held
    end: End
    uncertain_bytes: int


@record
class DeviceFit:
    """Does the step fit on a device?

    Attributes:
        device: The device.
        memory_bytes: Its memory.
        fits: Peak plus the CUDA context is within what a process finds there.
    """

    device: str
    memory_bytes: int
    fits: bool


@record
class DeviceProfile:
    """What a device can do, measured by calibration or taken from a datasheet.

    Attributes:
        name: What was measured, for people.
        flops_per_second: Floating-point operations a second in a large matrix product, by element
            type (``float32``). One that is missing computes as ``float32`` does, else as the
            fastest.
        bytes_per_second: Bytes a second read plus written by a large element-wise op.
        op_overhead_seconds: Least time of any op.
        curves: Seconds by size, where measured.
        new_memory_bytes_per_second: Bytes a second at which memory is touched for the first time
            that the system has just mapped, beyond the time of filling it. Absent where large
            results are not mapped anew.
        transfers: How fast bytes move when they are offloaded.
    """

    name: str
    flops_per_second: Mapping[str, float]
    bytes_per_second: float
    op_overhead_seconds: float
    curves: Curves | None = None
    new_memory_bytes_per_second: float | None = None
    transfers: Transfers | None = None


@record
class Dropped:
    """One dropped or stored allocation.

    Attributes:
        op: Index of the forward op that creates it.
        output: Position among the tensors that op returns.
        shape: Shape of that tensor, for the executor's check.
        bytes: Its size.
        module: Module path, for people.
        home: Forward op from which on requests for other values let it pass: it is computed or
            fetched for them and let go. Absent: it stays once it is there.
    """

    op: int
    output: int
    shape: tuple[int, ...]
    bytes: int
    module: str
    home: int | None = None


@record
class Edges:
    """Rows gathered for the edges of a graph, and what is computed of them row by row, in slices.

    Attributes:
        slices: Slices of the edges, at most.
        least_bytes: Size of the gathered rows that are put off, at least.
        kept: Gathers of that size, by number, that are not put off, as something looks at all of
            their rows.
    """

    slices: int
    least_bytes: int
    kept: tuple[int, ...] | None = None


@record
class End:
    """What becomes of the memory when the snapshot was taken.

    Attributes:
        releasable_bytes: What ``torch.cuda.empty_cache()`` gives back to the driver.
        stuck_bytes: Held by no tensor, yet not given back: segments of it hold tensors too.
        private_pools: Held by no tensor, in private pools, which give nothing back while they are
            in use.
        owners: Who holds the allocated bytes; they sum to them. The largest first.
        pinned_segments: The segments that keep ``stuck_bytes``, those with the most first; at most
            50.
        pinned_segment_count: Number of them, those not told included.
        pinning_bytes: Bytes of the blocks in them.
        summary: The same in a sentence.
    """

    releasable_bytes: int
    stuck_bytes: int
    private_pools: tuple[PrivatePool, ...]
    owners: tuple[Owner, ...]
    pinned_segments: tuple[PinnedSegment, ...]
    pinned_segment_count: int
    pinning_bytes: int
    summary: str


@record
class Estimate:
    """A predicted step.

    Attributes:
        predicted_peak_bytes: Peak of allocated bytes.
        predicted_step_seconds: Time under the plan's cost source; meaningful as a ratio.
    """

    predicted_peak_bytes: int
    predicted_step_seconds: float


Evidence = Literal["profiler", "stack", "stack_and_life", "life", "none"]
"""Why a category is believed: one word for each reason in the table above.

- ``profiler``: Rule 1.
- ``stack``: The stack alone: rules 2, 3, 5, 6, 7, 10, 11, 12, 16.
- ``stack_and_life``: The stack and when it was let go: rules 4, 8, 9.
- ``life``: When it was let go: rules 13, 14, 15.
- ``none``: Rule 17.
"""


@record
class Explanation:
    """What happened to the memory of every device in a snapshot.

    Attributes:
        schema_version: Version of this shape.
        source: The snapshot, as the caller named it.
        before: The earlier snapshot it is compared with.
        events: Number of recorded events.
        devices: By index.
        problems: What in the file contradicts itself; the rest was analysed.
    """

    schema_version: int
    source: str
    before: str | None
    events: int
    devices: tuple[DeviceExplanation, ...]
    problems: tuple[Contradiction, ...]


@record
class Fragmentation:
    """The inactive bytes of the peak, or of the moment of a refusal.

    Attributes:
        refusal_event: Index of the refused request at which it is judged; absent at the peak.
        inactive_bytes: Reserved and in no block.
        pinned_segments: Those with the most inactive bytes first; at most 50.
        verdict: What they are.
        releasable_bytes: Part of the inactive bytes that the allocator can give back to the driver.
        pinned_bytes: Inactive bytes in pinned segments, those not told included.
        pinned_segment_count: Number of pinned segments, those not told included.
        pinning_bytes: Bytes of the blocks that pin them.
        private_pools: Inactive bytes of private pools, by pool: nothing else can use them, and they
            do not go back.
        summary: The verdict in a sentence.
    """

    refusal_event: int | None
    inactive_bytes: int
    pinned_segments: tuple[PinnedSegment, ...]
    verdict: FragmentationVerdict
    releasable_bytes: int
    pinned_bytes: int
    pinned_segment_count: int
    pinning_bytes: int
    private_pools: tuple[PrivatePool, ...]
    summary: str


FragmentationVerdict = Literal["negligible", "cached", "fragmented", "not_the_cause", "unknown"]
"""What the inactive bytes are.

- ``negligible``: Less than 5 % of what is reserved is inactive.
- ``cached``: At least 5 % is inactive, but less than 10 % is stuck: the cache can give the rest
    back.
- ``fragmented``: At least 10 % of what is reserved is stuck in segments that blocks keep; where a
    request was refused, it was refused for fragmentation.
- ``not_the_cause``: At least 5 % is inactive, but a request was refused for another cause.
- ``unknown``: No history was recorded: the bytes are those when the snapshot was taken, and not
    judged.
"""


@record
class Front:
    """The answer.

    Attributes:
        schema_version: Version of this shape.
        target: The trace's target.
        batch: Batch size of the step.
        device_kind: Kind of device captured for.
        budget_bytes: The budget asked for.
        margin_bytes: What every plan keeps free below its budget.
        unplanned: Without a plan.
        minimum_peak_bytes: Smallest peak found over all plans.
        points: The plans, those of the strictest class first, by ascending peak.
        bound: Ascending in bytes, not ascending in ratio.
        cost_source: Where the costs come from.
        stop_reason: Why no more budgets were planned.
        plans: Budgets planned for.
        evaluations: Candidates evaluated for all of them.
        refusals: What was not possible, and why.
        notes: Words to the user.
    """

    schema_version: int
    target: str
    batch: int
    device_kind: str
    budget_bytes: int | None
    margin_bytes: int
    unplanned: Estimate
    minimum_peak_bytes: int
    points: tuple[FrontPoint, ...]
    bound: tuple[FrontBound, ...]
    cost_source: str
    stop_reason: FrontStop
    plans: int
    evaluations: int
    refusals: tuple[Refusal, ...]
    notes: tuple[str, ...]


@record
class FrontBound:
    """What no plan can beat.

    Attributes:
        peak_bytes: No plan of any class on the front whose peak is at most this ...
        ratio: ... takes less than this ratio; absent where there is no such plan at all.
    """

    peak_bytes: int
    ratio: float | None


@record
class FrontPoint:
    """A plan on the front.

    Attributes:
        budget_bytes: The budget: planning for it gives this plan.
        allow: What was allowed then.
        promise: Loosest class among the actions.
        predicted_peak_bytes: Peak of allocated bytes.
        predicted_step_seconds: Step time under the front's cost source.
        predicted_step_ratio: Planned over unplanned step time.
        lower_bound_ratio: No plan allowed within the budget can be faster than this ratio.
        stop_reason: Why the plan's search ended.
        actions: What is done.
        reserved: What the caching allocator holds; absent where there is none.
    """

    budget_bytes: int
    allow: Promise
    promise: Promise
    predicted_peak_bytes: int
    predicted_step_seconds: float
    predicted_step_ratio: float
    lower_bound_ratio: float
    stop_reason: StopReason
    actions: tuple[ActionSummary, ...]
    reserved: Reserved | None


FrontStop = Literal["resolved", "plan_limit"]
"""Why no more budgets were planned.

- ``resolved``: What is left between neighbours is too small to see.
- ``plan_limit``: The limit on the number of plans was reached.
"""


@record
class GpuFit:
    """Does the step fit on the GPU that was asked about?

    Attributes:
        gpu: Its name in the table.
        memory_bytes: Its memory, as the datasheet says.
        capacity_bytes: What PyTorch finds of it: the total capacity of its OOM messages.
        context_bytes: What the CUDA context and kernels are counted with.
        room_bytes: What is left for the step.
        allocated_fits: Whether the peak of allocated bytes is within the room.
        fits: Whether the peak of reserved bytes is, which decides.
    """

    gpu: str
    memory_bytes: int
    capacity_bytes: int
    context_bytes: int
    room_bytes: int
    allocated_fits: bool
    fits: bool


@record
class Growth:
    """A stack whose bytes rise at every step.

    Attributes:
        stack: Frames, one a line, innermost first.
        bytes_per_step: Rise from one step to the next, on average.
        bytes: Rise over all steps looked at.
        steps: Steps looked at; absent between two snapshots where their number is not known.
        category: What for.
        pattern: Which kind of leak it looks like.
    """

    stack: str
    bytes_per_step: int
    bytes: int
    steps: int | None
    category: SnapshotCategory
    pattern: Pattern


@record
class HalfParameters:
    """Parameters held in 16 bits, their gradients with them.

    Attributes:
        names: Names of the parameters in the type that autocast casts to beside it.
    """

    names: tuple[str, ...]


@record
class Head:
    """A linear layer over many classes of whose rows not all are used.

    Attributes:
        weight: The parameter that makes logits of hidden values, by its qualified name.
        logit_bytes: Size of the whole logits.
    """

    weight: str
    logit_bytes: int


@record
class Held:
    """Bytes of a device at a moment.

    Attributes:
        allocated_bytes: Held by tensors.
        active_bytes: In blocks that are not free.
        reserved_bytes: Taken from the driver.
    """

    allocated_bytes: int
    active_bytes: int
    reserved_bytes: int


@record
class Int8Weights:
    """Weights of linear layers held in 8 bits, with a scale for each row.

    Attributes:
        names: Names of the parameters that are quantised.
        dynamic: Those of them whose products are in 8 bits too: what they multiply is quantised at
            each use.
    """

    names: tuple[str, ...]
    dynamic: tuple[str, ...] | None = None


Kind = Literal[
    "remat",
    "unneeded_saves",
    "fuse_optimizer",
    "one_by_one",
    "micro_batch",
    "allocator_settings",
    "offload",
    "shrink",
    "offload_optimizer",
    "optimizer_bits",
    "offload_parameters",
    "autocast",
    "autocast_fp16",
    "half_parameters",
    "int8_weights",
    "int8_dynamic",
    "chunk",
    "no_graph",
    "undo_checkpoints",
]
"""One technique.

- ``remat``: Drop activations and recompute them in backward.
- ``unneeded_saves``: Let go of saved activations that backward never needs.
- ``fuse_optimizer``: Run the optimizer step per parameter inside backward and free its gradient.
- ``one_by_one``: Update one parameter at a time, after backward.
- ``micro_batch``: Split the batch and accumulate gradients.
- ``allocator_settings``: Set up the caching allocator against fragmentation, as in
    ``PYTORCH_CUDA_ALLOC_CONF``.
- ``offload``: Offload saved activations in forward and fetch them in backward.
- ``shrink``: Hold saved activations in fewer bits until backward.
- ``offload_optimizer``: Offload the optimizer's state, and fetch it for one parameter at a time.
- ``optimizer_bits``: Hold the optimizer's state in 8 bits, between updates and during them.
- ``offload_parameters``: Offload parameters, with a bounded part of them resident.
- ``autocast``: Compute matrix products and convolutions in bfloat16.
- ``autocast_fp16``: Compute them in float16, with a loss scale.
- ``half_parameters``: Hold weights and their gradients in 16 bits.
- ``int8_weights``: Hold weights of linear layers in 8 bits, for inference.
- ``int8_dynamic``: Compute linear layers in 8 bits, weights among them, for inference.
- ``chunk``: Compute large losses, wide layers, messages of graphs, images and attention in slices.
- ``no_graph``: Keep autograd off in a forward of inference that turns it on.
- ``undo_checkpoints``: Run the checkpoints of the model as ordinary forwards.
"""


@record
class LaterLoss:
    """The loss after steps on examples drawn from the batch, beside what other draws give.

    Attributes:
        steps: After how many steps.
        unplanned: Unplanned; not a number where it is absent.
        planned: Planned, with the same examples; likewise.
        lowest: The least and the most, unplanned, of these and some other draws; likewise.
    """

    steps: int
    unplanned: float | None
    planned: float | None
    lowest: float | None
    highest: float | None


@record
class LossChunk:
    """A loss over many classes in slices of rows: its logits never exist as a whole.

    Attributes:
        slices: Number of slices, at most.
        weight: The parameter that makes logits of hidden values, by its qualified name.
        rows: Rows of the logits.
        classes: Classes they are over.
        logit_bytes: Size of the whole logits.
    """

    slices: int
    weight: str
    rows: int
    classes: int
    logit_bytes: int


@record
class LossOfPieces:
    """A loss that a model's call returns, put together from those of the pieces.

    Attributes:
        place: Its place among the tensors that the call returns.
        reduction: How it reduces over the batch, see ``Meta.loss_reduction``.
    """

    place: int
    reduction: str


@record
class MeasuredDisk:
    """Where and how files were written and read."""

    folder: str
    method: str


@record
class MeasuredSize:
    """One size of one op.

    Attributes:
        bytes: Work of an op that moves bytes.
        flops: Work of an op that computes.
    """

    what: str
    seconds: float
    per_second: float
    spread: float
    runs: int
    bytes: int | None = None
    flops: int | None = None


@record
class MicroBatch:
    """The ops that the proof is about: each treats the items of the batch alike and apart.

    Attributes:
        names: Distinct ops of forward: name, a space and the arguments, or ``*`` where another
            batch size changes them.
        forward: Forward op by op: index into ``names``. The executor compares it with what really
            runs.
        call: How the model's call alone runs in pieces, where the rest of the step is a script's
            own; absent where the whole step does.
        results: Of inference: for each tensor that forward returns, the dimension along which those
            of the pieces are put together.
    """

    names: tuple[str, ...]
    forward: tuple[int, ...]
    call: CallInPieces | None = None
    results: tuple[int, ...] | None = None


@record
class ModelFacts:
    """What a model is, and takes in a step.

    Attributes:
        parameters: Elements of its parameters.
    """

    predicted_peak_bytes: int
    parameters: int
    parameter_bytes: int


@record
class NextClass:
    """What a looser class would gain.

    Attributes:
        promise: The class.
        predicted_peak_bytes: Peak under its best plan for the same budget.
        predicted_step_ratio: Its step time over the unplanned one.
        kinds: Kinds of action it uses.
    """

    promise: Promise
    predicted_peak_bytes: int
    predicted_step_ratio: float
    kinds: tuple[Kind, ...]


@record
class NextStep:
    """A command and what it tells.

    Attributes:
        command: What to run.
        tells: What it tells.
    """

    command: str
    tells: str


@record
class Offload:
    """What to offload, addressed like ``Remat``.

    Where a plan holds both, both watch the same regions.

    Attributes:
        tier: Where to.
        folder: The folder, for files; empty for the host's memory.
        window_bytes: Most bytes on their way out, and most fetched ahead.
        stores: The stored allocations, by creating op, ascending.
        order: In which order they are fetched ahead, as places in ``stores``. The others are
            fetched when asked for.
        active: As in ``Remat.active``.
        names: As in ``Remat.names``.
        forward: As in ``Remat.forward``.
    """

    tier: Tier
    folder: str
    window_bytes: int
    stores: tuple[Dropped, ...]
    order: tuple[int, ...]
    active: tuple[ActiveRegion, ...]
    names: tuple[str, ...]
    forward: tuple[int, ...]


@record
class OffloadOptimizer:
    """Which of the optimizer's state to offload, and how.

    Attributes:
        tier: Where to.
        folder: The folder, for files; empty for the host's memory.
        window_bytes: Most bytes fetched ahead of their update, and most on their way out.
        least_bytes: Smallest tensor that goes.
        order: Names of the parameters with offloaded state, in the order of their updates; those
            with state in 8 bits come slice by slice, in no order.
    """

    tier: Tier
    folder: str
    window_bytes: int
    least_bytes: int
    order: tuple[str, ...]


@record
class OffloadParameters:
    """Which parameters to offload, and how.

    Attributes:
        tier: Where to.
        folder: The folder, for files; empty for the host's memory.
        room_bytes: Most bytes of them in memory, or on their way, at a time.
        ahead_bytes: Most of those that are on their way, or came ahead and are not used yet.
        names: Names of those that go, one for each storage.
        order: In which order a step uses them, as places in ``names``.
    """

    tier: Tier
    folder: str
    room_bytes: int
    ahead_bytes: int
    names: tuple[str, ...]
    order: tuple[int, ...]


OomCause = Literal[
    "limit",
    "expandable_reserve",
    "too_much_alive",
    "other_processes",
    "non_pytorch",
    "private_pools",
    "fragmentation_possible",
    "driver_had_room",
]
"""A reason for a refusal.

- ``limit``: A limit of this process refused.
- ``expandable_reserve``: A request larger than an expandable segment can become.
- ``too_much_alive``: The tensors alive and the request are more than the process could have,
    however it is arranged.
- ``other_processes``: Other processes hold what was missing.
- ``non_pytorch``: This process holds it outside PyTorch.
- ``private_pools``: Private pools hold it, unused.
- ``fragmentation_possible``: The bytes were there, but perhaps not in one piece.
- ``driver_had_room``: The device had room and no limit was reached.
"""


@record
class OomMessage:
    """One message and what it decides.

    Attributes:
        count: How often the text has it.
        kind: Who wrote it.
        device: Index of the device, as the process numbers them.
        requested: What the driver was asked for: the request, rounded up to a segment.
        total: The device's memory.
        free: Free on the device when the message was written.
        allocated: In blocks that tensors hold.
        unallocated: Reserved by PyTorch in no block, outside private pools.
        private_unallocated: Reserved by PyTorch in no block, in private pools: only their own
            graphs can use it.
        reserved: Taken from the driver by PyTorch.
        allowed: The limit of this process.
        this_process: All that this process holds on the device.
        non_pytorch: Of ``this_process``, what PyTorch did not take: the CUDA context, libraries.
        other_processes: Other processes that the message names; without ``this_process``, one of
            them may be this process.
        is_expandable: Whether the message says that expandable segments were on.
        expandable_reserve: What an expandable segment could reach, where the message says so.
        is_cut: Whether the message ends before its last number.
        causes: What the numbers show.
        undecided: What they leave open.
        summary: What it comes down to, in a sentence.
        next: What would tell the rest.
    """

    count: int
    kind: OomMessageKind
    device: int | None
    requested: Amount | None
    total: Amount | None
    free: Amount | None
    allocated: Amount | None
    unallocated: Amount | None
    private_unallocated: Amount | None
    reserved: Amount | None
    allowed: Amount | None
    this_process: Amount | None
    non_pytorch: Amount | None
    other_processes: tuple[OtherProcess, ...]
    is_expandable: bool
    expandable_reserve: Amount | None
    is_cut: bool
    causes: tuple[ShownCause, ...]
    undecided: tuple[Undecided, ...]
    summary: str
    next: tuple[NextStep, ...]


OomMessageKind = Literal["allocator", "rejected", "driver_pool", "driver", "host"]
"""Who wrote a message.

- ``allocator``: PyTorch's caching allocator.
- ``rejected``: The same, before it asked the driver (``throw_on_cudamalloc_oom``).
- ``driver_pool``: PyTorch with ``backend:cudaMallocAsync``.
- ``driver``: The driver or a library, outside PyTorch's allocator: no numbers.
- ``host``: PyTorch's allocator of the host's memory.
"""


@record
class OomMessages:
    """The OOM messages of a text.

    Attributes:
        schema_version: Version of this shape.
        kind: What this document is about: always ``oom_messages``.
        source: The text, as the caller named it.
        message_count: Messages in it, the same ones counted each time.
        further_count: Messages after the first 100 different ones, which are not explained.
        messages: Each different message, in the order of the text.
    """

    schema_version: int
    kind: str
    source: str
    message_count: int
    further_count: int
    messages: tuple[OomMessage, ...]


@record
class OptimizerBits:
    """Whose state is in 8 bits.

    Attributes:
        names: Names of the parameters, in the order of the trace's updates.
        lower_halves: Whether lower halves of those that are held in ``bfloat16`` are kept, so that
            updates have 32 bits.
    """

    names: tuple[str, ...]
    lower_halves: bool | None = None


@record
class OtherProcess:
    """Another process on the device.

    Attributes:
        pid: Its number, as the driver knows it.
        bytes: What it holds; ``None`` where the driver does not tell.
    """

    pid: int
    bytes: Amount | None


@record
class OutOfMemory:
    """One refusal.

    Attributes:
        event: Index of the event.
        requested_bytes: What was asked for, rounded.
        cause: What it comes down to.
        parts: How the device's memory divides.
        device_free_bytes: Free on the device at that moment.
        largest_gap_bytes: Largest gap between blocks at that moment.
        stack: Who asked.
        summary: The cause in a sentence.
    """

    event: int
    requested_bytes: int
    cause: Cause
    parts: Parts
    device_free_bytes: int
    largest_gap_bytes: int
    stack: str
    summary: str


@record
class OutputError:
    """What approximate outputs are beside the unplanned ones.

    Lengths are Euclidean, over all that is returned.

    Attributes:
        error: Length of the difference over the length of the unplanned outputs; absent when it is
            not a number.
        cosine: Cosine of the angle between the two; absent when it is not a number.
        rows: Rows of the last dimension, where one tensor of two or three dimensions is returned:
            of logits, predictions.
        other_choices: How many of them have their largest number in another place.
        not_finite: Numbers that are finite unplanned, and not planned.
        max_error: The bound, as a part of the length.
    """

    error: float | None
    cosine: float | None
    rows: int
    other_choices: int
    not_finite: int
    max_error: float


@record
class Owner:
    """Bytes that one stack holds for one purpose.

    Attributes:
        stack: Frames, one a line, innermost first, as ``file:line function``.
        category: What for.
        bytes: Of its blocks.
        count: Number of blocks.
        module: Chain of modules from the outermost in, or the autograd node.
        evidence: Why the category is believed.
    """

    stack: str
    category: SnapshotCategory
    bytes: int
    count: int
    module: str
    evidence: Evidence


@record
class Parts:
    """How the device's memory divides.

    Attributes:
        live_set: Held by tensors.
        fragmentation: Reserved, in no block, private pools aside.
        cap: Free on the device but withheld by a limit.
        non_torch: Outside PyTorch's allocator; absent while the device's memory is not known.
        pending: Let go, but waiting for another stream, if only until the refusal.
        private_pools: Reserved by private pools that the request could not use, in no block.
    """

    live_set: int
    fragmentation: int
    cap: int
    non_torch: int | None
    pending: int
    private_pools: int


Pattern = Literal["kept_graph", "kept_scalar", "kept"]
"""A kind of leak that people make.

- ``kept_graph``: Activations of every step stay: something holds the autograd graph, such as
    ``total_loss += loss``.
- ``kept_scalar``: A number a step stays: a loss that is stored, or added up, as a tensor.
- ``kept``: Anything else that stays.
"""


@record
class Peak:
    """The peaks of a device.

    Attributes:
        allocated_bytes: Most bytes held by tensors.
        active_bytes: Most bytes in blocks that are not free.
        reserved_bytes: Most bytes taken from the driver.
        event: Index of the event after which ``allocated_bytes`` were first held; absent when it
            was before the first event.
        active_event: The same for ``active_bytes``.
        reserved_event: The same for ``reserved_bytes``.
        after_us: Microseconds from the first event to ``event``; absent without times.
    """

    allocated_bytes: int
    active_bytes: int
    reserved_bytes: int
    event: int | None
    active_event: int | None
    reserved_event: int | None
    after_us: int | None


@record
class PeakPoint:
    """Where the peak is.

    Attributes:
        op_index: Index of the op.
        op: Its name.
        phase: Part of the step.
        module: Module path.
        source: ``file:line``.
    """

    op_index: int
    op: str
    phase: Phase
    module: str
    source: str


Phase = Literal["forward", "backward", "optimizer"]
"""Part of the step an op belongs to.

- ``forward``: Model and loss.
- ``backward``: ``loss.backward()``.
- ``optimizer``: ``optimizer.step()`` and ``zero_grad()``.
"""


@record
class PinnedSegment:
    """A segment with inactive bytes that the blocks in it keep from going back.

    At the peak and at a refusal, more than half of its bytes; at the end, any.

    Attributes:
        address: Where it starts.
        bytes: Its bytes.
        inactive_bytes: Bytes in it that no block uses.
        block_count: Blocks in it.
        blocks: The largest of them.
    """

    address: int
    bytes: int
    inactive_bytes: int
    block_count: int
    blocks: tuple[PinningBlock, ...]


@record
class PinningBlock:
    """A block that keeps a segment.

    Attributes:
        bytes: Its bytes.
        category: What for.
        stack: Who asked for it.
    """

    bytes: int
    category: SnapshotCategory
    stack: str


@record
class Plan:
    """The answer.

    Attributes:
        schema_version: Version of this shape.
        target: The trace's target.
        trace_digest: Digest of the trace the plan was made for.
        batch: Batch size of the step it was made for.
        budget_bytes: The budget.
        margin_bytes: Kept free below the budget for what the prediction is not sure of.
        verdict: Does it fit?
        promise: Loosest class among the actions.
        unplanned: Without a plan.
        planned: With it. Where nothing fits: the plan with the smallest peak found.
        reserved: What the caching allocator holds for the planned step; absent where there is none.
        minimum_peak_bytes: Smallest peak found over all allowed plans; where work is limited, it is
            sought only if none fits.
        arena: One block that could hold all that the planned step allocates; absent in plans saved
            before this was known, and where work is limited and the plan fits.
        predicted_step_ratio: Planned over unplanned step time.
        lower_bound_ratio: No allowed plan within the budget can be faster than this ratio; 1 where
            none was found to fit.
        cost_source: Where the costs come from: ``roofline (...)`` or ``profile (...)``.
        stop_reason: Why the search ended.
        evaluations: Candidates evaluated.
        actions: What to do, in the order optimizer, batch, activations.
        refusals: What was not possible, and why.
        next_class: What the next class would gain; absent when it gains nothing or is used already.
        bottleneck: What stops the peak from going lower.
        loss_reduction: How the loss reduces over the batch, see ``Meta.loss_reduction``.
        notes: Words to the user: fallbacks, warnings (dropout under micro-batches).
    """

    schema_version: int
    target: str
    trace_digest: str
    batch: int
    budget_bytes: int
    margin_bytes: int
    verdict: Verdict
    promise: Promise
    unplanned: Estimate
    planned: Estimate
    reserved: Reserved | None
    minimum_peak_bytes: int
    arena: Arena | None
    predicted_step_ratio: float
    lower_bound_ratio: float
    cost_source: str
    stop_reason: StopReason
    evaluations: int
    actions: tuple[Action, ...]
    refusals: tuple[Refusal, ...]
    next_class: NextClass | None
    bottleneck: Bottleneck | None
    loss_reduction: str
    notes: tuple[str, ...]


@record
class PlanSummary:
    """A plan without what only the executor needs.

    Attributes:
        predicted_step_ratio: Planned over unplanned step time.
        lower_bound_ratio: No allowed plan within the budget can be faster than this.
    """

    actions: tuple[ActionSummary, ...]
    predicted_step_ratio: float
    lower_bound_ratio: float


@record
class Point:
    """One measured size.

    Attributes:
        work: FLOPs or bytes, as the curve's owner says.
        seconds: Seconds of the whole op, dispatch included.
    """

    work: float
    seconds: float


@record
class Prediction:
    """What a prediction says.

    One struct: the text report, the JSON and Python read the same fields.

    Attributes:
        schema_version: Version of this shape.
        target: The trace's target.
        batch: Batch size predicted for.
        device_kind: Device kind.
        predicted_peak_bytes: Peak of allocated bytes.
        interval_bytes: The peak lies in ``[low, high]``; what makes it uncertain is in
            ``uncertainty``.
        uncertainty: One sentence for each uncertain term.
        reserved: What the caching allocator takes from the device, under PyTorch's default
            settings; absent where there is none.
        peak: Where the peak is.
        breakdown: Who owns the bytes alive at the peak.
        top: The largest allocations alive at the peak.
        unneeded_saves: What autograd saves and backward never needs, by the line that saves it,
            most bytes first.
        wide_tensors: What is held at the peak in wider elements than its use asks for, by the line
            that makes it, most savings first; only what is at least 1 % of the peak.
        narrower_peak_bytes: The peak of the same ops if nothing were wide for these reasons; absent
            where nothing is.
        timeline: Bytes at each op, thinned to at most 512 points; each is the maximum of its
            stretch.
        phases: Peak in each phase.
        largest_batch: Largest batch within the budget, when one was given and the law is known; 0
            when none fits.
        devices: Which devices of the table it fits on, unplanned.
        gpu: Whether it fits on the GPU that was asked about, when one was.
        notes: What the capture had to say, and what pruning adds.
    """

    schema_version: int
    target: str
    batch: int
    device_kind: str
    predicted_peak_bytes: int
    interval_bytes: tuple[int, int]
    uncertainty: tuple[str, ...]
    reserved: Reserved | None
    peak: PeakPoint
    breakdown: Breakdown
    top: tuple[TopAllocation, ...]
    unneeded_saves: tuple[UnneededSaves, ...]
    wide_tensors: tuple[WideTensors, ...]
    narrower_peak_bytes: int | None
    timeline: tuple[TimelinePoint, ...]
    phases: tuple[tuple[Phase, int], ...]
    largest_batch: int | None
    devices: tuple[DeviceFit, ...]
    gpu: GpuFit | None
    notes: tuple[str, ...]


@record
class PrivatePool:
    """A private pool that holds bytes in no block.

    Attributes:
        pool: Its id as PyTorch writes it, such as ``(0, 1)``.
        inactive_bytes: Reserved by it, in no block.
    """

    pool: str
    inactive_bytes: int


Promise = Literal["exact", "equivalent", "approximate"]
"""The promise an action makes about numbers. Ordered from strict to loose.

- ``exact``: Loss and every gradient bitwise equal to the unplanned step.
- ``equivalent``: Same mathematics; rounding may differ.
- ``approximate``: Numerics change.
"""


@record
class PrunedGroup:
    """Channels of one kind.

    Attributes:
        channels: How many there were.
        kept: How many are left.
        parameters: Parameters and buffers that have something of each.
    """

    channels: int
    kept: int
    parameters: tuple[str, ...]


@record
class Pruning:
    """``memfit prune --format json``.

    Attributes:
        budget_bytes: Most that the step may take; absent where a number of parameters was asked
            for.
        scores: What channels were chosen by.
        share: Which part of each group went, rounded down to whole channels.
        trials: Steps of pruned copies that were recorded to find which sizes are written in code.
    """

    schema_version: int
    budget_bytes: int | None
    scores: str
    share: float
    before: ModelFacts
    after: ModelFacts
    groups: tuple[PrunedGroup, ...]
    stays: tuple[StayingParameters, ...]
    trials: int


Reference = Literal["eager", "torch_compile"]
"""What a compiled step is held against.

- ``eager``: The eager step.
- ``torch_compile``: The step under ``torch.compile`` alone: it draws the same random numbers, and
    eager steps do not.
"""


@record
class Refusal:
    """Why an action is not in the plan.

    Attributes:
        kind: The action.
        reason: The reason, as a sentence without full stop.
    """

    kind: Kind
    reason: str


@record
class Remat:
    """Where to drop, addressed by the order of ops in forward.

    Attributes:
        drops: The dropped allocations, by creating op, ascending.
        active: Module calls in which the executor must watch; disjoint, ascending. A region with an
            empty module path stands for the whole forward, the loss function included.
        names: Distinct op names of forward.
        forward: Forward op by op: index into ``names``. The executor compares it with what really
            runs.
    """

    drops: tuple[Dropped, ...]
    active: tuple[ActiveRegion, ...]
    names: tuple[str, ...]
    forward: tuple[int, ...]


@record
class Replay:
    """``memfit replay --format json``.

    Attributes:
        notes: What was asked for and can change nothing, in sentences.
    """

    schema_version: int
    source: str
    devices: tuple[ReplayedDevice, ...]
    notes: tuple[str, ...]


@record
class ReplayedCount:
    """How many of how many are as recorded."""

    matched: int
    total: int


@record
class ReplayedDevice:
    """One device's requests, replayed.

    Attributes:
        allocations: Addresses of allocations that the simulated allocator predicts under the
            recording's settings.
        segments: New segments that it predicts.
        final_segments: Segments that end up with the same blocks.
        replays: The best first, the recording's own among them.
    """

    index: int
    events: int
    allocations: ReplayedCount
    segments: ReplayedCount
    final_segments: ReplayedCount
    replays: tuple[ReplayedSettings, ...]


@record
class ReplayedSettings:
    """Settings, and what came of the requests under them.

    Attributes:
        settings: As in ``PYTORCH_CUDA_ALLOC_CONF``; empty for PyTorch's defaults.
        oom_avoided: ``null`` where no OOM was recorded.
    """

    settings: str
    is_recorded: bool
    peak_reserved_bytes: int
    peak_allocated_bytes: int
    num_alloc_retries: int
    device_calls: int
    is_refused: bool
    oom_avoided: bool | None


@record
class Reserved:
    """What the allocator is predicted to hold.

    Attributes:
        peak_reserved_bytes: Peak of bytes taken from the device under the settings of ``settings``.
        peak_allocated_bytes: Peak of bytes in blocks handed out: requests, rounded.
        fragmentation_bytes: Taken from the device and not handed out, at the moment of most
            allocated bytes in the last step.
        settings: ``PYTORCH_CUDA_ALLOC_CONF``; empty for PyTorch's defaults.
        steps: Steps simulated until the allocator took no more from the device.
    """

    peak_reserved_bytes: int
    peak_allocated_bytes: int
    fragmentation_bytes: int
    settings: str
    steps: int


@record
class Share:
    """One owner.

    Attributes:
        name: Its name; ``(before the step)`` for what no op of the step made.
        bytes: Its bytes.
        count: Its allocations.
    """

    name: str
    bytes: int
    count: int


@record
class ShownCause:
    """A cause that the numbers show.

    Attributes:
        cause: Which.
        bytes: The bytes it is about: those held, or, of ``too_much_alive``, those that must go; of
            ``limit``, the limit.
        is_enough: Whether the request is served once this alone changes; ``None`` where the numbers
            do not tell.
        summary: The cause in a sentence.
    """

    cause: OomCause
    bytes: Amount | None
    is_enough: bool | None
    summary: str


@record
class Shrink:
    """What to shrink, addressed like ``Remat``.

    Attributes:
        half: The allocations held in ``bfloat16``, by creating op, ascending.
        eight_bit: The allocations held in 8 bits, likewise.
        active: As in ``Remat.active``.
        names: As in ``Remat.names``.
        forward: As in ``Remat.forward``.
    """

    half: tuple[Dropped, ...]
    eight_bit: tuple[Dropped, ...]
    active: tuple[ActiveRegion, ...]
    names: tuple[str, ...]
    forward: tuple[int, ...]


SnapshotCategory = Literal[
    "parameter",
    "gradient",
    "optimizer_state",
    "activation",
    "temporary",
    "workspace",
    "input",
    "kv_cache",
    "checkpoint",
    "communication",
    "unknown",
]
"""What a block was for.

- ``parameter``: A parameter or buffer of a module.
- ``gradient``: The gradient of a parameter.
- ``optimizer_state``: State of the optimizer.
- ``activation``: Made by forward.
- ``temporary``: Made and gone within backward or within the optimizer's step.
- ``workspace``: Scratch of a library.
- ``input``: A batch.
- ``kv_cache``: Keys and values kept for generation.
- ``checkpoint``: Read from a file of weights.
- ``communication``: A collective's.
- ``unknown``: Nothing tells.
"""


@record
class StayingParameters:
    """Parameters with dimensions that stay, for one reason.

    Attributes:
        why: The reason, as a clause.
    """

    why: str
    parameters: tuple[str, ...]


@record
class StepFacts:
    """One way to run the step: what was predicted and what was measured.

    Attributes:
        measured_peak_bytes: Absent when nothing ran.
        step_cpu_seconds: Absent when nothing ran.
    """

    predicted_peak_bytes: int
    measured_peak_bytes: int | None
    step_cpu_seconds: float | None


StepSource = Literal["annotations", "optimizer_stacks", "backward_stacks", "rhythm"]
"""How the boundaries were found.

- ``annotations``: Rule 1.
- ``optimizer_stacks``: Rule 2.
- ``backward_stacks``: Rule 3.
- ``rhythm``: Rule 4.
"""


@record
class StepsFound:
    """The steps of a recording.

    Attributes:
        boundary_count: Boundaries between steps.
        source: How they were found.
    """

    boundary_count: int
    source: StepSource


StopReason = Literal[
    "nothing_to_do",
    "proved_optimal",
    "near_bound",
    "local_optimum",
    "move_limit",
    "time_limit",
    "proved_infeasible",
    "not_found",
]
"""Why the search ended.

- ``nothing_to_do``: The unplanned step fits: nothing to do.
- ``proved_optimal``: The plan's time meets the lower bound.
- ``near_bound``: The plan adds no more than a thousandth of forward above the lower bound.
- ``local_optimum``: No move of the neighbourhood improves the plan.
- ``move_limit``: The limit on the work of the search was reached.
- ``time_limit``: The time limit was reached.
- ``proved_infeasible``: No plan fits, shown by the lower bound on the peak.
- ``not_found``: No plan that fits was found.
"""


@record
class Strips:
    """Large tensors that convolutions and products take a strip of rows at a time.

    Attributes:
        strips: Strips of a tensor, at most.
        least_bytes: Size of the tensors that are put off, at least; of one item, where a batch of
            images has several.
        kept: Calls that take strips, by number, whose results are not written over what they take,
            as that is used again.
    """

    strips: int
    least_bytes: int
    kept: tuple[int, ...] | None = None


Tier = Literal["host", "disk"]
"""Where bytes go that leave a device.

- ``host``: The host's memory: for devices that have one of their own.
- ``disk``: Files.
"""


@record
class TimelinePoint:
    """One point of the timeline.

    Attributes:
        op_index: Index of the first op of the stretch.
        bytes: Most bytes alive in it.
    """

    op_index: int
    bytes: int


@record
class TopAllocation:
    """One allocation alive at the peak.

    Attributes:
        bytes: Its size.
        category: Its role.
        name: Name of the parameter or batch entry, if it is one.
        op: The op that made it.
        module: Module of that op.
        source: Source line of that op.
        shape: Shape of the first value in it.
        dtype: Its element type.
    """

    bytes: int
    category: Category
    name: str
    op: str
    module: str
    source: str
    shape: tuple[int, ...]
    dtype: str


@record
class TorchCompile:
    """The step under ``torch.compile`` without memfit.

    Attributes:
        max_relative_error: How far loss and gradients are from eager on the same random numbers;
            absent when not a number.
    """

    measured_peak_bytes: int
    step_cpu_seconds: float
    max_relative_error: float | None


@record
class Transfers:
    """Bytes a second between a device and where it offloads to, each absent where not known.

    Attributes:
        host_to_device_pinned: From pinned host memory.
        device_to_host_pinned: To pinned host memory.
        host_to_device_pageable: From pageable host memory.
        device_to_host_pageable: To pageable host memory.
        disk_write: Writing files, on the disk when counted.
        disk_read: Reading files that no cache holds.
    """

    host_to_device_pinned: float | None
    device_to_host_pinned: float | None
    host_to_device_pageable: float | None
    device_to_host_pageable: float | None
    disk_write: float | None
    disk_read: float | None


@record
class Undecided:
    """What the numbers do not tell.

    Attributes:
        cause: The cause that is left open.
        summary: Why, in a sentence.
    """

    cause: OomCause
    summary: str


@record
class UnneededSaves:
    """What one line saves for nothing.

    Attributes:
        source: ``file:line`` of the ops that save them.
        module: The module that holds all of these ops; empty for the model.
        count: How many allocations.
        bytes: Their bytes. Nothing but autograd holds them in the end.
        is_shape_needed: Whether backward runs there, and reads the shapes alone; otherwise it does
            not run there at all.
    """

    source: str
    module: str
    count: int
    bytes: int
    is_shape_needed: bool


Verdict = Literal["fits", "does_not_fit"]
"""Does the planned step fit?

- ``fits``: Predicted peak plus margin is within the budget.
- ``does_not_fit``: No allowed plan found fits.
"""


@record
class Verification:
    """``memfit verify --format json``.

    Attributes:
        verdict: ``fits`` when the measured planned peak is within the budget.
        holds: Whether peak and numbers are what the plan promises; ``null`` when nothing ran.
        gradients: Absent when nothing ran.
        loss: Absent when nothing ran.
        plan: The eager plan; ``null`` where the step ran compiled.
        approximation: How far gradients are off; absent for a plan that does not change them, and
            when nothing ran.
        compiled: With ``--compile``, where the step ran so.
        not_compiled: With ``--compile``, why the step ran eager.
        outputs: How far outputs are off; absent for a plan that does not change them or trains, and
            when nothing ran.
    """

    schema_version: int
    target: str
    budget_bytes: int
    verdict: Verdict
    holds: bool | None
    unplanned: StepFacts
    planned: StepFacts
    minimum_peak_bytes: int
    gradients: Comparison | None
    loss: Comparison | None
    plan: PlanSummary | None
    capture_seconds: float
    plan_seconds: float
    approximation: Approximation | None = None
    compiled: CompiledFacts | None = None
    not_compiled: str | None = None
    outputs: OutputError | None = None


WideReason = Literal["float64", "mask", "compared", "named_mask", "index"]
"""Why fewer bytes an element would do.

- ``float64``: Numbers of 64 bits.
- ``mask``: Made of comparisons and constants alone, and only multiplied, added, compared or filled
    with.
- ``compared``: There before the step, and only compared with a number or made a ``bool``.
- ``named_mask``: A module buffer named a mask that is only added to something; a ``bool`` does if
    it holds 0 and -inf alone.
- ``index``: Only looks up rows of tables whose sizes are known.
"""


@record
class WideTensors:
    """What one line holds at the peak in wider elements than its use asks for.

    Attributes:
        reason: Why fewer bytes would do.
        dtype: Element type that it has.
        narrower_dtype: Element type that would do.
        category: Role of these tensors.
        source: ``file:line`` of the ops that make them; empty for what is there before the step.
        module: The module that holds all of these ops; empty for the model.
        name: Name of the module buffer or batch entry, where it is one.
        count: How many allocations.
        bytes: Their bytes at the peak.
        saved_bytes: What the narrower type would save of these.
    """

    reason: WideReason
    dtype: str
    narrower_dtype: str
    category: Category
    source: str
    module: str
    name: str
    count: int
    bytes: int
    saved_bytes: int


Curve: TypeAlias = tuple[Point, ...]
"""Seconds of an op by its work, as measured at a few sizes.

A roofline (Williams, Waterman and Patterson, *Roofline*, CACM 52(4), 2009) with one number for each
roof says that small ops reach the peak rate, which they do not. A curve holds the rate that each
size reached.
"""
