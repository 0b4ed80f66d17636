"""Writes down every op of a step as the dispatcher sees it.

Responsible for the dispatch mode: one record per op, values read, written and returned, phases,
autograd nodes, and answering value-dependent control flow from shadows. Not responsible for running
the step (:mod:`memfit.capture.record.step`), for lives (:mod:`memfit.capture.record.ledger`), or
for the shape of the trace file (:mod:`memfit.capture.trace_writer`).

The forward ops recorded, and their order, are exactly those a dispatch mode sees in the real eager
forward, because plans address ops by that index. Two things autograd's hooks and torch itself add
are let through unrecorded: queries in the ``prim`` namespace, and the ``detach`` of what an unpack
hook returned.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.autograd.function import BackwardCFunction
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map_only

from memfit.capture.probe.any_scalar import SCALAR, scalar_or_any
from memfit.capture.probe.gpu_scratch import takes_gpu_scratch
from memfit.capture.probe.scratch_ops import takes_scratch
from memfit.capture.record.decoding import NOTE, asks_for_end, may_ask_for_end, none_ends
from memfit.capture.record.ledger import Ledger
from memfit.capture.record.loss_reduction import reduction_of
from memfit.capture.record.module_calls import ModuleCalls
from memfit.capture.record.originals import Originals
from memfit.capture.record.saves import Contents, InMemory, SavedTensors
from memfit.capture.record.shadow import Shadows, UnknownValueError
from memfit.capture.record.source_line import SourceLines
from memfit.capture.record.strides import laid_out
from memfit.capture.record.view_replays import ViewReplays
from memfit.capture.stage.arguments import (
    are_strided,
    arguments_text,
    returned_tensors,
    tensors_of,
    written_tensors,
)
from memfit.capture.stage.call_shape import Call, describe_call
from memfit.errors import CaptureError
from memfit.tensors.as_without_modes import Formulas
from memfit.tensors.gradient_sums import GradientSums
from memfit.tensors.operators import Operator, draws_random_numbers, operator_of
from memfit.tensors.storage import is_wrapper, may_change_unseen
from memfit.weights.one_device import AskedGpus

FORWARD, BACKWARD, OPTIMIZER = "forward", "backward", "optimizer"

_DETACH = torch.ops.aten.detach.default
_EQUAL = torch.ops.aten.equal.default
_INDEX = torch.ops.aten.index.Tensor
_CUDNN_RNN = torch.ops.aten._cudnn_rnn.default
_MASKS = frozenset({torch.bool, torch.uint8})

_FAKE_FAILURES = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)


class RealStepNeeded(BaseException):
    """The step cannot be followed on fakes; outside `Exception` so that user code lets it pass."""


@dataclass(slots=True)
class OpRecord:
    """One op, as recorded; indices are those of the ledger.

    Attributes:
        operator: The op.
        phase: ``forward``, ``backward`` or ``optimizer``.
        module: Path of the innermost module.
        source: ``file:line`` that called it.
        arguments: Arguments that are not tensors, as text.
        sequence: Sequence number of the autograd node, or ``None``.
        reads: Values read.
        writes: Values written, at their version afterwards.
        hidden_writes: Writes to an argument without saying so: running statistics.
        outputs: Values returned.
        flops: Floating-point operations.
        moved_bytes: Bytes read plus bytes written, each value once; 0 for a view.
        random: Draws random numbers.
        view: Only makes a view.
        replayable: Can be run again with the same result.
    """

    operator: Operator
    phase: str
    module: str
    source: str
    arguments: str
    sequence: int | None
    reads: list[int]
    writes: list[int]
    hidden_writes: bool
    outputs: list[int]
    flops: int
    moved_bytes: int
    random: bool
    view: bool
    replayable: bool


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records a step while it is entered, below a fake mode or on real tensors.

    Attributes:
        ops: The ops, in execution order.
        phase: Part of the step that is running.
        ledger: Allocations and values.
        saved: What autograd saved.
        modules: Running modules.
        notes: Things the reader of the trace should know.
        reductions: By op index, how an op that may be the loss reduces.
        scratch_calls: By op index, the call of an op that may need scratch of its own.
        formulas: The formulas of autograd that have run.
        failure: Why the step cannot be followed on fakes, once that is known.
        running_node: Sequence number and name of the node that runs, where the autograd engine is
            not torch's own; ``None`` otherwise.
    """

    def __init__(
        self,
        model: nn.Module,
        fake_mode: FakeTensorMode | None,
        *,
        lean: bool = True,
        originals: Originals | None = None,
        keep: Callable[[torch.UntypedStorage], Contents] = InMemory,
        on_gpu: bool = False,
        expected: list[str] | None = None,
    ) -> None:
        """Create a recorder.

        Args:
            model: The copy of the model that will run.
            fake_mode: The fake mode the step runs under; ``None`` for a real step.
            lean: Whether autograd is kept from holding what it saves.
            originals: The user's own tensors, which must not appear in a step that runs on copies.
            keep: Keeps the contents of what autograd saves in a real step.
            on_gpu: Whether calls are probed on a GPU, else on the CPU.
            expected: Names of the ops that the step has to run; it is given up at the first other
                one.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        # Before anything counts nodes: it makes some. Of what a script runs, plans expect no more.
        self.formulas = Formulas(None if fake_mode is None else GradientSums(fakes=True))
        self.ops: list[OpRecord] = []
        self.phase = FORWARD
        self.ledger = Ledger()
        self.saved = SavedTensors(self.ledger, fake_mode, lean=lean, keep=keep)
        self.modules = ModuleCalls(model, self.ledger)
        self.sources = SourceLines()
        self.notes: dict[str, None] = {}
        self.reductions: dict[int, str] = {}
        self.scratch_calls: dict[int, Call] = {}
        self.shadows = Shadows(self.ledger)
        self.failure: str | None = None
        self._view_replays = ViewReplays()
        self._changes_unseen: dict[int, bool] = {}
        self._fake_mode = fake_mode
        self._on_gpu = on_gpu
        self._expected = expected
        self._gpus = AskedGpus("the step")
        self._originals = originals
        self._foreign: dict[int, tuple[Tensor, Tensor]] = {}
        self._last_sequence = torch._C._autograd._get_sequence_nr() - 1
        self._origin: dict[int, tuple[str, str]] = {}
        self._current_node = torch._C._current_autograd_node
        self._sequence_number = torch._C._autograd._get_sequence_nr
        self.running_node: tuple[int, str] | None = None
        self.saved.convert_foreign_with(self._adopt)

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Not wrapped for dynamo, which never sees a recorded step: the wrapper costs time."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run one op and write it down."""
        kwargs = kwargs or {}
        if isinstance(func, HigherOrderOperator):
            return self._ops_of(func, args, kwargs)
        operator = operator_of(func)
        if not operator.counted or self._hides(func, args):
            return func(*args, **kwargs)
        if any(map(is_wrapper, types)):
            return NotImplemented  # its class runs ops on what it wraps, which come here
        if self._view_replays.is_next(func, args):
            out = func(*args, **kwargs)
            self._view_replays.ran(out)
            return out
        running = self._running()
        if running is None:
            return self._record(func, operator, args, kwargs)
        func, args = self.formulas.instead(*running, func, args)
        out = self._record(func, operator_of(func), args, kwargs)
        self.formulas.has_made(out)
        return out

    def _running(self) -> tuple[int, str] | None:
        """Sequence number and name of the node that runs; no name for a function of the user's."""
        if self.running_node is not None:
            return self.running_node
        node = self._current_node()
        if node is None:
            return None
        return node._sequence_nr(), "" if isinstance(node, BackwardCFunction) else node.name()

    def _record(
        self, func: Any, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run an op that counts and write it down."""
        ledger = self.ledger
        index = ledger.now
        self.saved.settle_writes()
        self.saved.shape_saves.op(operator.name, args)
        if self._fake_mode is not None and not operator.lift:
            args, kwargs = self._adopt_arguments(args, kwargs)
        read_tensors = [] if operator.lift else tensors_of(args, kwargs)
        read: list[int] = []
        reads: list[int] = []
        for tensor in read_tensors:
            known = len(ledger.bytes)
            try:
                allocation = ledger.seen(tensor)
                reads.append(ledger.value(tensor, allocation))
            except (RuntimeError, NotImplementedError):
                self._note_storageless(operator)
                continue
            if allocation == known and self._originals is not None:
                self._originals.refuse(tensor)
            read.append(allocation)
            if self._fake_mode is None and allocation not in self._changes_unseen:
                self._changes_unseen[allocation] = may_change_unseen(tensor)
        ledger.now = index + 1
        try:
            out = self._run(func, operator, args, kwargs, read)
        except BaseException:
            ledger.now = index
            raise
        self._write_down(index, func, operator, args, kwargs, read, reads, out)
        if operator.written and self._fake_mode is not None:
            self._view_replays.expect(written_tensors(operator, args, kwargs), read_tensors)
        return out

    def _ops_of(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run what an operator over operators consists of, op by op."""
        kernel = func.py_kernels.get(torch._C.DispatchKey.CompositeExplicitAutograd)
        if kernel is None:
            return NotImplemented
        with self:
            return kernel(*args, **kwargs)

    def _hides(self, func: Any, args: tuple[Any, ...]) -> bool:
        """Whether an op is torch's ``detach`` of what an unpack hook has just returned."""
        unpacked, self.saved.unpacked = self.saved.unpacked, None
        return func is _DETACH and id(args[0]) == unpacked

    def _run(
        self,
        func: Any,
        operator: Operator,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        read: list[int],
    ) -> Any:
        """Run an op, on its shadows where its result depends on values."""
        if self._fake_mode is None:
            return func(*args, **kwargs)
        if func is _CUDNN_RNN:
            self.failure = f"`{operator.name}` keeps memory for backward that only cuDNN knows"
            raise RealStepNeeded(self.failure)
        if func is SCALAR and self.phase is OPTIMIZER:
            return scalar_or_any(args[0])
        if operator.dynamic_shape or func is SCALAR or func is _EQUAL:
            try:
                if func is _INDEX:
                    args = self._without_masks(args)
                elif self.shadows.knows(read):
                    return self._as_fakes(self.shadows.compute(func, args, kwargs))
            except UnknownValueError:
                pass  # the fake op says what it cannot know
        try:
            out = func(*args, **kwargs)
            if isinstance(out, Tensor) and out.layout is not torch.strided:
                # On fakes it has no elements, whatever it has in a real step.
                self.failure = f"`{operator.name}` makes a sparse tensor"
                raise RealStepNeeded(self.failure)
            return laid_out(out, func, args, kwargs)
        except _FAKE_FAILURES as error:
            self.failure = (
                f"`{operator.name}` in `{self.modules.path or 'the model'}` needs values that only "
                f"a real step has ({type(error).__name__})"
            )
            raise RealStepNeeded(self.failure) from error

    def _write_down(
        self,
        index: int,
        func: Any,
        operator: Operator,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        read: list[int],
        reads: list[int],
        out: Any,
    ) -> None:
        """Add the record of an op that has run."""
        if self._expected is not None and self._expected[index : index + 1] != [operator.name]:
            self.failure = f"`{operator.name}` is another op than the one expected"
            raise RealStepNeeded(self.failure)
        written, writes, outputs, view = self._note_results(
            index, func, operator, args, kwargs, read, out
        )
        if self.phase is FORWARD:
            reduction = reduction_of(operator, args, kwargs)
            if reduction:
                self.reductions[index] = reduction
        self._note_scratch(index, func, operator.name, args, kwargs)
        module, source, sequence = self._where()
        sizes = self.ledger.value_bytes
        still = view or operator.uninitialised
        self.ops.append(
            OpRecord(
                operator=operator,
                phase=self.phase,
                module=module,
                source=source,
                arguments=arguments_text(operator, args, kwargs),
                sequence=sequence,
                reads=reads,
                writes=writes,
                hidden_writes=bool(operator.hidden_positions(args)),
                outputs=outputs,
                flops=int(operator.flops(*args, **kwargs, out_val=out)) if operator.flops else 0,
                moved_bytes=0 if still else sum(sizes[v] for v in {*reads, *outputs, *writes}),
                random=draws_random_numbers(operator, args, kwargs),
                view=view,
                replayable=(
                    operator.repeatable
                    and kwargs.get("generator") is None
                    and len(written) <= 1
                    and are_strided(args, kwargs)
                    and not any(map(self._changes_unseen.get, read))
                ),
            )
        )

    def _note_scratch(
        self, index: int, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Know a call that may take scratch memory, which is found out by another one like it."""
        if takes_gpu_scratch(name) if self._on_gpu else takes_scratch(name, args, kwargs):
            self.scratch_calls[index] = describe_call(func, args, kwargs)

    def _note_results(
        self,
        index: int,
        func: Any,
        operator: Operator,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        read: list[int],
        out: Any,
    ) -> tuple[list[int], list[int], list[int], bool]:
        """Know what an op made and wrote to, and the values of that which follow from the batch.

        Returns:
            Allocations written, values written, values returned, and whether it made views alone.
        """
        written, writes = self._note_writes(operator, args, kwargs)
        returned = returned_tensors(out)
        outputs, fresh = self._note_outputs(index, operator, returned)
        if self._fake_mode is not None and self.phase is not OPTIMIZER:
            if operator.lift:
                for allocation, _ in fresh:
                    self.shadows.own(allocation, args[0])
            elif fresh or written:
                self.shadows.follow(func, operator, args, kwargs, read, written, fresh, returned)
                if may_ask_for_end(operator):
                    self._go_on_decoding(fresh)
        return written, writes, outputs, bool(returned) and not fresh and not written

    def _go_on_decoding(self, fresh: list[tuple[int, Tensor]]) -> None:
        """Answer whether a token that the model chose ends its sequence: it does not."""
        if not asks_for_end(self.sources.current()):
            return
        for allocation, answer in fresh:
            if not self.shadows.knows([allocation]):
                self.shadows.own(allocation, none_ends(answer))
                self.notes[NOTE] = None

    def _note_writes(
        self, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[list[int], list[int]]:
        """Give what a call wrote to its next version; returns allocations and values written."""
        if not operator.written:
            return [], []
        ledger = self.ledger
        tensors = written_tensors(operator, args, kwargs)
        written: list[int] = []
        for tensor in tensors:
            allocation = ledger.seen(tensor)
            if allocation not in written:
                written.append(allocation)
                ledger.version[allocation] += 1
                self.saved.written(tensor.untyped_storage(), allocation)
            if operator.resizes:
                ledger.resized(tensor, allocation)
        return written, [ledger.value(t, ledger.seen(t)) for t in tensors]

    def _note_outputs(
        self, index: int, operator: Operator, returned: list[Tensor]
    ) -> tuple[list[int], list[tuple[int, Tensor]]]:
        """Values a call returned, and its new allocations with the tensor that showed each."""
        ledger = self.ledger
        outputs: list[int] = []
        fresh: list[tuple[int, Tensor]] = []
        next_new = len(ledger.bytes)
        for tensor in returned:
            try:
                allocation = ledger.seen(tensor, index)
                outputs.append(ledger.value(tensor, allocation))
            except (RuntimeError, NotImplementedError):
                self._note_storageless(operator)
                continue
            if allocation >= next_new:
                if self._fake_mode is not None and tensor.device.type == "cuda":
                    self._note_gpu(tensor.device)
                fresh.append((allocation, tensor))
                next_new = allocation + 1
        return outputs, fresh

    def _note_gpu(self, device: torch.device) -> None:
        """Refuse a GPU beside another, or beside the processor that the step is recorded for."""
        if not self._on_gpu:
            message = f"the step is on the CPU and makes tensors on `{device}`"
            error = CaptureError(message)
            error.add_note("predict it for a GPU, which need not be here: `--device cuda`")
            raise error
        self._gpus.ask(device)

    def _where(self) -> tuple[str, str, int | None]:
        """Module path, source line and node of the op that just ran."""
        modules = self.modules
        node = self._running()
        if node is not None:
            running, _ = node
            origin = self._origin.get(running)
            if origin is not None and not modules.inside:
                return (*origin, running)
            known = running if origin is not None else None
            return modules.path, self.sources.current(), known
        source = self.sources.current()
        if self.phase is not FORWARD:
            return "", source, None
        sequence = self._sequence_number() - 1
        if sequence == self._last_sequence:
            return modules.path, source, None
        self._last_sequence = sequence
        self._origin[sequence] = (modules.path, source)
        return modules.path, source, sequence

    def _adopt_arguments(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Replace real tensors, which come from outside model and batch, by fakes."""
        if all(isinstance(t, FakeTensor) for t in tensors_of(args, kwargs)):
            return args, kwargs
        return tree_map_only(Tensor, self._adopt, (args, kwargs))  # type: ignore[no-any-return]

    def hold(self, tensor: Tensor, device: str) -> int:
        """The allocation of a strided tensor that the step's own functions hold.

        Args:
            tensor: The tensor.
            device: Where the step has it, ``cpu`` or ``cuda``.
        """
        if self._fake_mode is not None and not isinstance(tensor, FakeTensor):
            tensor = self._stand_in(tensor, device)
        return self.ledger.seen(tensor)

    def _adopt(self, tensor: Tensor) -> Tensor:
        """The fake that stands for a real tensor from outside model and batch."""
        if isinstance(tensor, FakeTensor):
            return tensor
        self._refuse_original(tensor)
        if tensor.requires_grad and tensor.is_leaf and torch.is_grad_enabled():
            message = (
                f"a tensor of shape {tuple(tensor.shape)} requires grad and is no parameter of the "
                "model: register it in the model"
            )
            raise CaptureError(message)
        return self._stand_in(tensor)

    def _refuse_original(self, tensor: Tensor) -> None:
        """Refuse one of the workload's own, for which no fake stands."""
        if self._originals is not None and not self._originals.may_have_a_twin(tensor):
            self._originals.refuse(tensor)

    def _stand_in(self, tensor: Tensor, device: str | None = None) -> Tensor:
        """The fake that stands for a real tensor, the same each time, on its device or another."""
        known = self._foreign.get(id(tensor))
        if known is not None:
            return known[1]
        self._refuse_original(tensor)
        assert self._fake_mode is not None
        with _disable_current_modes():
            fake: Tensor = self._fake_mode.from_tensor(tensor.detach())
            if device not in {None, fake.device.type}:
                with self._fake_mode:
                    fake = torch.empty_strided(
                        tuple(fake.shape), fake.stride(), dtype=fake.dtype, device=device
                    )
        if self._originals is not None and self.ledger.find(fake) is None:
            self._originals.refuse(tensor)
        self._foreign[id(tensor)] = (tensor, fake)
        allocation = self.ledger.seen(fake)
        self.shadows.lend(allocation, tensor)
        return fake

    def _as_fakes(self, real: Any) -> Any:
        """Fakes like the real results of an op whose result shapes depend on values."""
        assert self._fake_mode is not None
        return tree_map_only(Tensor, self._fake_mode.from_tensor, real)

    def _without_masks(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Replace boolean indices whose values are known by the indices they select."""
        indices: list[Any] = []
        for index in args[1]:
            known = (
                index is not None
                and index.dtype in _MASKS
                and self.shadows.knows([self.ledger.seen(index)])
            )
            if known:
                with torch._C._DisableTorchDispatch():
                    selected = self.shadows.real(index).nonzero().unbind(1)
                indices.extend(self._as_fakes([part.contiguous() for part in selected]))
            else:
                indices.append(index)
        return (args[0], indices)

    def _note_storageless(self, operator: Operator) -> None:
        self.notes[
            f"`{operator.name}` uses a tensor without a plain storage; its memory is not counted"
        ] = None
