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
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from memfit import _native
from memfit.apply.offload.state_view import whole_state_bytes
from memfit.capture.record.recorder import BACKWARD, FORWARD, OPTIMIZER, Recorder
from memfit.capture.record.roles import Roles
from memfit.capture.stage.stage import batch_entries
from memfit.run.script.contexts import Nesting
from memfit.run.script.lean_backward import NONE_IN_TWO
from memfit.run.script.remains import Passing, Remains
from memfit.run.script.saves_keeper import SavesKeeper
from memfit.run.script.script_recorder import PLAIN, ScriptRecorder
from memfit.run.script.spill import SpillFile
from memfit.run.script.stash import GradientStash
from memfit.run.script.update_needs import UpdateNeeds, update_needs
from memfit.run.script.updates import refusal, updates_of
from memfit.tensors.moments import eight_bit_refusal
from memfit.tensors.optimizers import gradients_reduced_later, in_memory
from memfit.tensors.sliced_update import state_slices
from memfit.tensors.storage import address, gradient_of, is_fixed, plain_tensors, viewed


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
        most_bytes: int | None = None,
    ) -> None:
        """Begin; the root is about to run.

        Args:
            root: The model.
            inputs: Its arguments.
            optimizers: The optimizers known so far.
            device_kind: ``cpu`` or ``cuda``.
            budget_bytes: What the step may take; 0 where that is not known.
            folder: Where contents go; empty for the system's folder for temporary files.
            most_bytes: Where nothing is written down, and what autograd saves is only kept: up to
                how much in memory it stays there; ``None`` for a recording.
        """
        self._spill = SpillFile(folder)
        self._root = root
        self._device_kind = device_kind
        self._roles = Roles()
        self._recorder = (
            ScriptRecorder(root, self._spill)
            if most_bytes is None
            else SavesKeeper(root, self._spill, most_bytes)
        )
        leaves = (p for p in root.parameters() if p.is_leaf)  # others may be lent for a call
        self._gradients_before = frozenset(id(p) for p in leaves if p.grad is not None)
        self._whole, self._forward = contextlib.ExitStack(), contextlib.ExitStack()
        if most_bytes is None:
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
        return self._recorder.holds_graph()

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
        self._recorder.pass_ended()
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
        if type(tensor) not in PLAIN:
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
