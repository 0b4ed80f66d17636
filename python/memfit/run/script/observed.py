"""One step of the script, run as it is and written down.

Responsible for recording the script's own forward, backward and optimizer step, with everything
that autograd saves kept in a file meanwhile. Not responsible for when that is done
(:mod:`memfit.run.script.script`) nor for the plan made from it
(:mod:`memfit.run.script.recorded_step`).

Why the real step, and not a copy of the model on fakes as :mod:`memfit.capture` prefers: nobody but
the script knows its loss. And it costs little memory: a recording wants to know how long a tensor
lives when autograd does *not* hold it, so autograd must not hold it, and the file that keeps the
contents makes this the step with the smallest activations that there is, without any plan.
"""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from memfit import _native
from memfit.apply.offload.state_view import whole_state_bytes
from memfit.apply.remat.records import require_unchanged
from memfit.apply.slices.deferred import DeferredLogits
from memfit.capture.record.recorder import BACKWARD, FORWARD, OPTIMIZER, Recorder
from memfit.capture.record.roles import Roles
from memfit.capture.record.saves import SavedTensors, Token
from memfit.capture.stage.arguments import written_tensors
from memfit.capture.stage.stage import batch_entries
from memfit.run.script.contexts import Nesting
from memfit.run.script.lean_backward import NONE_IN_TWO, LeanBackward
from memfit.run.script.recomputed import Recomputed
from memfit.run.script.remains import Passing, Remains
from memfit.run.script.spill import SpillFile
from memfit.run.script.stash import GradientStash
from memfit.run.script.update_needs import UpdateNeeds, update_needs
from memfit.run.script.updates import refusal, updates_of
from memfit.tensors.backward_in_place import Lean
from memfit.tensors.moments import eight_bit_refusal
from memfit.tensors.operators import Operator
from memfit.tensors.optimizers import gradients_reduced_later, in_memory
from memfit.tensors.sliced_update import state_slices
from memfit.tensors.stand_ins import StandIn
from memfit.tensors.storage import address, gradient_of, is_fixed, plain_tensors, viewed
from memfit.tensors.versions import counter_of, version_of

_PLAIN = frozenset({Tensor, nn.Parameter, nn.Buffer})


class _Saved(StandIn):
    """A token of the recording, and what tells whether the tensor was written to since."""

    __slots__ = ("counter", "is_view", "keeper", "shape", "token", "version")

    def __init__(self, tensor: Tensor, token: Any, keeper: SavedTensors) -> None:
        self.token = token
        self.keeper = keeper
        self.is_view = tensor._is_view()
        self.shape = list(tensor.shape)
        self.version = version_of(tensor)
        known = token.counter if isinstance(token, Token) else None
        self.counter = counter_of(tensor) if known is None else known

    def require_unchanged(self) -> None:
        """Refuse what autograd itself would refuse.

        Raises:
            RuntimeError: The saved tensor was written to since.
        """
        if self.counter is not None:
            require_unchanged(self.counter, self.version, self.shape)

    def let_go(self) -> Tensor | None:
        """Hold the tensor no longer, where a node can that keeps it in a planned step.

        A view there keeps what it is a view of.

        Returns:
            What looks like it and takes no memory; ``None`` where it stays.
        """
        if self.is_view or not isinstance(self.token, Token):
            return None
        blank = self.keeper.let_go(self.token)
        if blank is not None:
            self.token = None
        return blank

    def held(self, known: set[int]) -> Iterator[Tensor]:  # noqa: ARG002 - there is but one
        """The tensor, where it is not held in files."""
        tensor = self.token.tensor if isinstance(self.token, Token) else self.token
        if tensor is not None:
            yield tensor


class ScriptRecorder(Recorder):  # type: ignore[no-untyped-call]
    """A recorder of real ops that never stands in their way.

    Attributes:
        problem: Why the step could not be recorded to its end; empty while it could.
        seconds: What each op took.
        scratch: Bytes that each op took inside, above what was there before and after it.
        gradients: Where gradients are meanwhile; ``None`` where they stay.
        lean: Has ops of backward write over the gradient that they read; ``None`` for none.
        since: Number of the event of allocation before which everything was there.
    """

    def __init__(self, root: nn.Module, spill: SpillFile) -> None:
        """Create a recorder.

        Args:
            root: The model; paths are from there.
            spill: Keeps what autograd saves.
        """
        super().__init__(root, None, keep=spill.keep)
        self.problem = ""
        self.seconds: list[float] = []
        self.scratch: list[int] = []
        self.gradients: GradientStash | None = None
        self.lean: LeanBackward | None = None
        self._op_is_reached = False
        self._took = (0.0, 0)
        self.since = _native.last_event()
        self.ledger.came_meanwhile = self._came_meanwhile
        # One for all ops: to end one reads every block that it has seen.
        self._window = _native.AllocationWindow()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run one op, and write it down as long as that works."""
        kwargs = kwargs or {}
        if DeferredLogits in types:
            return NotImplemented  # the op comes again, with the logits themselves
        if not self.problem and not _PLAIN.issuperset(types):
            self.problem = f"it uses a tensor class, `{_first_other(types).__name__}`"
        if self.problem:
            return func(*args, **kwargs)
        self._op_is_reached = False
        try:
            if self.lean is not None and self.phase is BACKWARD:
                call = self.lean.ops.instead(func, args, kwargs)
                if call is not None and self.lean.writes(call):
                    return self._run_lean(call, types)
            return super().__torch_dispatch__(func, types, args, kwargs)
        except Exception as error:
            if self._op_is_reached:
                raise  # the op's own
            self.problem = _broken(error)
            return func(*args, **kwargs)

    def _run_lean(self, call: Lean, types: Any) -> Any:
        """Run what takes less than an op of backward, and write that down."""

        def run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if self.problem:
                return func(*args, **kwargs)
            self._op_is_reached = False
            try:
                return Recorder.__torch_dispatch__(self, func, types, args, kwargs)
            except Exception as error:
                if self._op_is_reached:
                    raise  # the op's own
                self.problem = _broken(error)  # what it reads may be gone: the rest goes on
                return func(*args, **kwargs)

        return call.run(run)

    def _run(self, func: Any, facts: Any, args: Any, kwargs: Any, read: Any) -> Any:
        self._op_is_reached = True
        self._window.restart()
        before = _native.counted_bytes()
        start, cpu_start = time.perf_counter(), time.process_time()
        try:
            result = super()._run(func, facts, args, kwargs, read)
        finally:
            # The smaller one: waiting while others run is not the op's, nor is each thread's time.
            # A clock that ticks rarely shows no CPU time for most ops.
            seconds = time.perf_counter() - start
            seconds = min(seconds, time.process_time() - cpu_start or seconds)
            peak = self._window.peak()[0]
        self._took = (seconds, max(peak - max(before, _native.counted_bytes()), 0))
        return result

    def _write_down(self, *args: Any) -> None:
        try:
            super()._write_down(*args)
            self.seconds.append(self._took[0])
            self.scratch.append(self._took[1])
        except Exception as error:  # noqa: BLE001 - the op has run, and the script goes on
            self.problem = _broken(error)

    def _came_meanwhile(self, storage: torch.UntypedStorage) -> bool:
        place = address(storage) if storage.device.type == "cpu" else None
        return place is not None and _native.block_event(place) > self.since

    def gradients_away(self) -> tuple[int, int]:
        """Bytes of all gradients without memory now, and of the largest of them."""
        return (0, 0) if self.gradients is None else self.gradients.away_bytes

    def moves(self, tensor: Tensor, storage: torch.UntypedStorage) -> None:
        """Know a tensor in the other memory that it is about to have.

        Args:
            tensor: The tensor.
            storage: The other memory.
        """
        allocation = self.ledger.find(tensor)
        if allocation is not None:
            self.ledger.stand_in(storage, allocation)

    def pack(self, tensor: Tensor) -> Any:
        """What autograd holds instead of a tensor that it saves."""
        if self.problem or not _has_memory(tensor):
            return tensor
        with torch.no_grad():
            return _Saved(tensor, self.saved.pack(tensor), self.saved)

    def pack_recomputed(self, tensor: Tensor) -> Tensor | Recomputed:
        """What stands for a tensor that a checkpoint of the script saves when it recomputes."""
        if self.problem or not _has_memory(tensor):
            return tensor
        allocation = self.ledger.seen(tensor)
        if self.ledger.static[allocation]:
            return tensor
        with torch.no_grad():
            contents = self.saved.contents(tensor.untyped_storage(), allocation)
            return Recomputed(tensor, self.ledger, allocation, contents)

    def unpack_recomputed(self, held: Any) -> Tensor:
        """The tensor that was recomputed.

        Raises:
            RuntimeError: It was written to since, as autograd itself would say.
        """
        tensor: Tensor = held.tensor() if isinstance(held, Recomputed) else held
        self.saved.unpacked = id(tensor)
        return tensor

    def unpack(self, saved: Any) -> Tensor:
        """The tensor that autograd saved.

        Raises:
            RuntimeError: It was written to since, as autograd itself would say.
        """
        if isinstance(saved, Tensor):
            return saved
        saved.require_unchanged()
        if saved.token is None:
            raise RuntimeError("a saved tensor was asked for again that its node had let go of")
        return self.saved.unpack(saved.token)


def _has_memory(tensor: Tensor) -> bool:
    """Whether a tensor has memory; one of zeros that were never written has none.

    Such are tangents that do not change, of forward-mode differentiation.
    """
    is_strided = type(tensor) in _PLAIN and tensor.layout is torch.strided
    return is_strided and not tensor._is_zerotensor()


class SavesKeeper(ScriptRecorder):  # type: ignore[no-untyped-call]
    """Keeps what autograd saves where a recording does, and writes no op down.

    A tensor is known from the first time that autograd saves it, as one that came with the step or
    was made in it by when its memory was allocated. So this is for the CPU alone.
    """

    def _record(self, func: Any, operator: Operator, args: Any, kwargs: Any) -> Any:
        saved, ledger = self.saved, self.ledger
        saved.settle_writes()
        saved.shape_saves.op(operator.name, args)
        self._op_is_reached = True
        ledger.now += 1
        out = func(*args, **kwargs)
        if operator.written:
            for tensor in written_tensors(operator, args, kwargs):
                if tensor.layout is torch.strided:
                    self._note_write(tensor, resizes=operator.resizes)
        return out

    def _note_write(self, tensor: Tensor, *, resizes: bool) -> None:
        ledger = self.ledger
        allocation = ledger.find(tensor)
        if allocation is None:
            return  # nothing of it is saved
        ledger.version[allocation] += 1
        self.saved.written(tensor.untyped_storage(), allocation)
        if resizes:
            ledger.resized(tensor, allocation)


def _first_other(types: Iterable[type]) -> type:
    return next(kind for kind in types if kind not in _PLAIN)


def _broken(error: Exception) -> str:
    return f"it cannot be recorded ({type(error).__name__}: {error})"


@dataclass(slots=True)
class Observation:
    """A recorded step.

    Attributes:
        recorder: What ran.
        roles: Which allocation is what.
        optimizer: Class name of the optimizer.
        device_kind: ``cpu`` or ``cuda``.
        root_calls: Calls of the first root in the forward.
        gradients_before: ``id`` of the parameters that had a gradient when it began.
        left: Storages, weakly, that the step made and left behind: its loss, outputs of its model.
        remains: The same, with the graphs that it left.
        went: Where in it those of the step before went, by size; ``None`` where that was not
            recorded.
        found: Storages, weakly, that ops of the step read and that were there before, such as
            another model or the script's data; parameters and what else is known are left out.
        state_stays: Why the optimizer's state cannot go elsewhere; ``None`` where it can.
        eight_bit_refusal: Why it has no form in 8 bits; ``None`` where it has.
        fusing_refusal: Why its updates cannot run inside backward; empty where they can.
        consumed_bytes: Bytes that were there before, that the step read, and that are gone.
        mapped_input_bytes: Bytes of its inputs that were in files instead of memory.
        input_bytes: Bytes of those in memory, with all that they are parts of.
        unrecorded: What the optimizer's updates take, where memfit made them instead of recording.
        resting_state_bytes: State then of parameters that the step did not update.
        owners: The ``id`` of the parameter of an allocation.
        slices: In how many slices parameters are updated whose state is elsewhere, by allocation.
        spill_problem: Why saved tensors were kept in memory; empty where they were not.
        undoes: Whether the script's checkpoints were undone in it.
        effect: What the model's code does besides computing, as a clause; empty where nothing was
            seen.
        way: The action by which it ran: the model on pieces of its batch, or all under autocast;
            ``None`` where it ran as it is.
        less: What of its slices it may run in, where it did not run in all.
        peak_bytes: Most bytes live at once in it, whoever held them; 0 before it was over.
        may_round: Whether ops ran in pieces, which may change rounding.
        in_two_above: Of which size on convolutions let go of their input.
        called: Path of the module whose call began it; empty for the model.
    """

    recorder: ScriptRecorder
    roles: Roles
    optimizer: str
    device_kind: str
    root_calls: int
    gradients_before: frozenset[int]
    left: list[weakref.ref[Any]]
    remains: Remains
    went: dict[int, list[int]] | None
    found: list[weakref.ref[Any]]
    consumed_bytes: int
    mapped_input_bytes: int
    input_bytes: int
    state_stays: str | None
    eight_bit_refusal: str | None
    fusing_refusal: str
    unrecorded: UpdateNeeds | None
    resting_state_bytes: int
    owners: dict[int, int]
    slices: dict[int, int]
    spill_problem: str
    undoes: bool = False
    effect: str = ""
    way: dict[str, Any] | None = None
    less: dict[str, Any] | None = None
    peak_bytes: int = 0
    may_round: bool = False
    in_two_above: int = NONE_IN_TWO
    called: str = ""

    @property
    def passing(self) -> Passing:
        """What it left and goes in the course of the next step."""
        return self.remains.passing(self.went or {})

    def asks_for_another(self, budget_bytes: int) -> bool:
        """Whether it left much of which another recording would tell where it goes.

        Args:
            budget_bytes: The budget; 0 where that is not known.
        """
        left = self.remains.all_bytes
        return self.went is None and left >= WORTH_A_LOOK * (budget_bytes or self.peak_bytes)


WORTH_A_LOOK = 0.01
"""Share of the budget that a step leaves behind, above which another one is recorded."""


class StepRecording:
    """A step of the script under the recorder, from a model's call to the optimizer's end."""

    def __init__(
        self,
        root: nn.Module,
        inputs: Any,
        optimizers: Iterable[Optimizer],
        device_kind: str,
        budget_bytes: int = 0,
        folder: str = "",
        *,
        learns: bool = True,
    ) -> None:
        """Begin; the root is about to run.

        Args:
            root: The model.
            inputs: Its arguments.
            optimizers: The optimizers known so far.
            device_kind: ``cpu`` or ``cuda``.
            budget_bytes: What the step may take; 0 where that is not known.
            folder: Where contents go; empty for the system's folder for temporary files.
            learns: Whether the step is written down; else it only keeps what autograd saves.
        """
        self._spill = SpillFile(folder)
        self._root = root
        self._device_kind = device_kind
        self._roles = Roles()
        self._recorder = (ScriptRecorder if learns else SavesKeeper)(root, self._spill)
        leaves = (p for p in root.parameters() if p.is_leaf)  # others may be lent for a call
        self._gradients_before = frozenset(id(p) for p in leaves if p.grad is not None)
        self._whole, self._forward = contextlib.ExitStack(), contextlib.ExitStack()
        if learns:
            self._register(inputs, optimizers)
            self._whole.enter_context(self._recorder.modules)
        self._gradients = self._recorder.gradients = GradientStash(
            self._spill, self._recorder.moves
        )
        if budget_bytes and gradients_reduced_later(root) is None:
            self._gradients.watch(root.parameters())
        for parameter in root.parameters():
            if parameter.requires_grad and parameter.is_leaf:  # `functional_call` brings others
                handle = parameter.register_post_accumulate_grad_hook(self._gradient_ready)  # type: ignore[no-untyped-call]
                self._whole.callback(handle.remove)
        hooks = torch.autograd.graph.saved_tensors_hooks(self._recorder.pack, self._recorder.unpack)
        self._forward.enter_context(hooks)
        self._whole.enter_context(self._recorder)
        self._nesting = Nesting()
        self._needs: UpdateNeeds | None = None
        self._ready: dict[int, int] = {}
        self._unrecorded: UpdateNeeds | None = None
        self._owners: dict[int, int] = {}
        self._slices: dict[int, int] = {}
        self._before: Remains | None = None

    @property
    def recorder(self) -> ScriptRecorder:
        """What writes it down."""
        return self._recorder

    def follows(self, before: Remains) -> None:
        """Watch where in this step goes what the one before it left.

        Args:
            before: What that is.
        """
        self._before = before
        before.next_begins(self._recorder.ledger)

    def holds_graph(self) -> bool:
        """Whether anything that autograd saved in the forward so far is still needed."""
        return any(save.release is None for save in self._recorder.saved.saves)

    def backward_begins(self) -> None:
        """Backward is about to begin, the first time or again."""
        if self._recorder.phase is FORWARD:
            with self._nesting.cleared():
                self._forward.close()
            self._recorder.modules.recording = False
        self._recorder.phase = BACKWARD
        self._gradients.begin()

    def backward_ended(self) -> None:
        """What comes next belongs to the optimizer, unless another backward comes."""
        self._gradients.backward_ended()
        self._recorder.phase = OPTIMIZER

    def updates_begin(self, needs: UpdateNeeds) -> None:
        """The optimizer is about to step.

        Args:
            needs: What that takes.
        """
        self._needs = needs

    def leave_out_updates(self) -> None:
        """Record nothing of the optimizer's step, which is about to begin: memfit makes it."""
        self._unrecorded = self._needs
        self._stop()
        self._gradients.updates_begin()

    def abandon(self) -> None:
        """Stop recording; what autograd saved stays where it is for as long as it is needed."""
        self._stop()
        self._gradients.close()
        self._recorder.ledger.closing = True

    def _stop(self) -> None:
        with self._nesting.cleared():
            self._forward.close()
            self._whole.close()

    def finish(self, optimizers: Iterable[Optimizer], root_calls: int) -> Observation:
        """End the recording after the optimizer's step.

        Args:
            optimizers: Those that update the model.
            root_calls: Calls of the root in the forward.
        """
        optimizers = list(optimizers)
        names = [type(optimizer).__name__ for optimizer in optimizers]
        recorder = self._recorder
        ledger = recorder.ledger
        for gradient in self._held_gradients():
            self._note(self._roles.gradients, gradient)
        if self._unrecorded is None:
            self._note_state(optimizers)
        for kept in viewed(self._root.parameters()):
            self._note(self._roles.fixed, kept)
        state_stays = refusal(self._root, optimizers)
        if state_stays is None:
            state_stays = self._note_updates(optimizers[0])
        left = ledger.made_and_held(self._roles.gradients | self._roles.optimizer_state)
        holds = ((i, tokens) for i, tokens in recorder.saved.held() if not ledger.is_held(i))
        graphs = [(ledger.bytes[i], tokens) for i, tokens in holds]
        remains = Remains(filter(None, (ref() for ref in left)), graphs)
        roles = self._roles
        known = roles.parameters | roles.module_buffers | roles.gradients | roles.optimizer_state
        found = ledger.found_and_held(known | roles.inputs)
        consumed_bytes = ledger.found_and_gone_bytes(known | roles.inputs)
        mapped_bytes = sum(ledger.bytes[i] for i in roles.inputs)
        held = [part for it in self._held_gradients() for part in plain_tensors(it)]
        gradients = {it.untyped_storage()._cdata for it in held}
        # Those are in files here, perhaps, and in memory in the steps that follow.
        ledger.take_no_memory(lambda storage: storage._cdata in gradients or is_memory(storage))
        input_bytes = sum(ledger.bytes[i] for i in roles.inputs)
        ledger.close()
        recorder.saved.close(ledger.now)
        self.abandon()
        _order_phases(recorder)
        return Observation(
            recorder,
            self._roles,
            " + ".join(dict.fromkeys(names)),
            self._device_kind,
            root_calls,
            self._gradients_before,
            left,
            remains,
            self._before.went() if self._before is not None else None,
            found,
            consumed_bytes,
            mapped_bytes - input_bytes,
            input_bytes,
            state_stays,
            state_stays or eight_bit_refusal(optimizers[0]),
            state_stays or "the optimizer was not called as usual",
            self._unrecorded,
            self._resting_state_bytes(optimizers),
            self._owners,
            self._slices,
            self._spill.problem,
        )

    def _held_gradients(self) -> list[Tensor]:
        """The gradients of the model."""
        found = map(gradient_of, self._root.parameters())
        return [it for it in found if it is not None]

    def _note_updates(self, optimizer: Optimizer) -> str | None:
        """Note what each update takes; why the state stays where that cannot be known."""
        ledger = self._recorder.ledger
        try:
            needs = self._needs or update_needs(optimizer)
        except Exception as error:  # noqa: BLE001 - whatever an optimizer does to fakes
            return f"its updates cannot be run on fakes ({type(error).__name__}: {error})"
        self._roles.updates = updates_of(
            optimizer, ledger.seen, needs, self._ready, with_state=self._unrecorded is None
        )
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                allocation = ledger.seen(parameter)
                self._owners[allocation] = id(parameter)
                self._slices[allocation] = state_slices(optimizer, group, parameter)
        return None

    def _resting_state_bytes(self, optimizers: Iterable[Optimizer]) -> int:
        """State of parameters that were not updated, where updates were left out of the recording.

        They are in no plan then, wherever it has the state of others.
        """
        if self._unrecorded is None:
            return 0
        states = (it for optimizer in optimizers for it in optimizer.state.items())
        return whole_state_bytes(state for of, state in states if gradient_of(of) is None)

    def _gradient_ready(self, parameter: Tensor) -> None:
        self._ready[id(parameter)] = self._recorder.ledger.now
        self._gradients.complete(parameter)

    def _register(self, inputs: Any, optimizers: Iterable[Optimizer]) -> None:
        """Give everything that exists before the step its allocation, role and name."""
        roles = self._roles
        for name, parameter in self._root.named_parameters():
            self._name(roles.parameters, parameter, name)
            if is_fixed(parameter):
                self._note(roles.fixed, parameter)
            if parameter.is_leaf and parameter.grad is not None:
                self._name(roles.gradients, parameter.grad, "")
        for name, buffer in self._root.named_buffers():
            self._name(roles.module_buffers, buffer, name)
        for name, tensor in batch_entries(inputs):
            self._name(roles.inputs, tensor, name)
        self._note_state(optimizers)

    def _name(self, members: set[int], tensor: Tensor, name: str) -> None:
        allocation = self._note(members, tensor)
        if allocation is not None and name:
            self._roles.names.setdefault(allocation, name)

    def _note(self, members: set[int], tensor: Tensor) -> int | None:
        if type(tensor) not in _PLAIN:
            return None
        allocations = [self._recorder.ledger.seen(part) for part in plain_tensors(tensor)]
        members.update(allocations)
        return allocations[0] if len(allocations) == 1 else None

    def _note_state(self, optimizers: Iterable[Optimizer]) -> None:
        for optimizer in optimizers:
            held = [dict(in_memory(state)) for state in optimizer.state.values()]
            for leaf in tree_leaves(held):
                if isinstance(leaf, Tensor):
                    self._note(self._roles.optimizer_state, leaf)


def is_memory(storage: torch.UntypedStorage) -> bool:
    """Whether bytes are in memory that counts, and not in a mapped file or another process's.

    Args:
        storage: Where they are.
    """
    if storage.device.type != "cpu":
        return True
    place = address(storage)
    return place is None or _native.is_counted(place)


def _order_phases(recorder: Recorder) -> None:
    """What runs between two backwards belongs to backward."""
    phases = [op.phase for op in recorder.ops]
    if BACKWARD not in phases:
        return
    last = len(phases) - 1 - phases[::-1].index(BACKWARD)
    for op in recorder.ops[:last]:
        if op.phase is not FORWARD:
            op.phase = BACKWARD
