"""What a training script does, as it happens: model calls, backward, optimizer steps.

Responsible for seeing them in an unmodified script, and for never letting a failure of memfit reach
it. Not responsible for what follows from them (:mod:`memfit.run.script.script`).

Module calls are seen by standing in for ``nn.Module.__call__``: torch's global hooks do not show
keyword arguments, and do not fire after ``KeyboardInterrupt``. Calls of ``forward`` itself, where
the script makes any, are seen by :mod:`memfit.run.script.direct_calls`. Only the outermost call of
the main thread is told. While something runs that ``torch.compile`` compiled, ``nn.Module`` is as
torch has it: the compiler looks into its calls.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.optim import Optimizer

from memfit.run.script.contexts import is_traced
from memfit.run.script.current_pass import FORBIDS_HOOKS, FORWARD_MODE
from memfit.run.script.direct_calls import DirectCalls
from memfit.run.script.fused import UpdatesMadeError
from memfit.run.script.loaded import LoadCall
from memfit.run.script.own_methods import OwnMethods
from memfit.run.script.shared_memory import Sharing
from memfit.tensors.garbage import collected_once
from memfit.track.steps import STEPS


class Listener(Protocol):
    """Told what the script does."""

    def called(self, root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A module is about to run that no other module has called."""

    def failed(self) -> None:
        """It raised."""

    def gave(self, result: Any) -> None:
        """The model has computed what it returns."""

    def returned(self) -> None:
        """It is over, after :meth:`failed` if it raised."""

    def backward_begins(
        self,
        results: tuple[Tensor, ...],
        *,
        accumulates: bool,
        creates_graph: bool,
        inputs: tuple[Any, ...],
    ) -> None:
        """Autograd's engine is about to run: for leaves' gradients, or for given inputs."""

    def backward_ended(self) -> None:
        """It has run."""

    def forbids_watching(self, why: tuple[str, str]) -> None:
        """Something is about to run that fails, or computes otherwise, where ops are watched."""

    def copies(self) -> None:
        """A module is about to be copied or pickled, with all that is registered on it."""

    def traces(self) -> None:
        """TorchScript is about to trace a module, whose parameters it reads without a call."""

    def optimizer_made(self, optimizer: Optimizer) -> None:
        """An optimizer has been made."""

    def optimizer_begins(self, optimizer: Optimizer) -> None:
        """An optimizer is about to step."""

    def updates(self, optimizer: Optimizer) -> None:
        """Its updates are about to come; what is raised is the script's to see."""

    def optimizer_works(self) -> None:
        """What of the updates nobody has made is about to be made by the optimizer itself."""

    def optimizer_ended(self, optimizer: Optimizer) -> None:
        """It has stepped."""

    def method_begins(self, optimizer: Optimizer, name: str) -> None:
        """A method is about to run that an optimizer has besides those of torch's."""

    def method_ended(self, optimizer: Optimizer, name: str) -> None:
        """It is over."""

    def compiled_runs(self) -> None:
        """Something compiled is about to run; what it calls is not told."""

    def broke(self, error: Exception) -> None:
        """One of the methods above failed; nothing more is told."""


class FileListener(Protocol):
    """Told what the script saves, loads and shares."""

    def saves(self, optimizer: Optimizer) -> None:
        """It is about to be asked for its ``state_dict()``."""

    def saved(self) -> None:
        """It has given it, or raised."""

    def state_loaded(self, optimizer: Optimizer) -> None:
        """It has been given the state of a ``state_dict``."""

    def loads(self, call: LoadCall) -> None:
        """``torch.load`` is about to read a file."""

    def loaded(self, call: LoadCall) -> None:
        """It has, to where it was told."""

    def shares(self, tensor: Tensor) -> None:
        """A tensor in a mapped file is about to be shared with other processes."""


class Signals:
    """The stand-ins, from :meth:`install` to :meth:`remove`.

    Attributes:
        are_ops_own: Whether ops that run now are memfit's: the listener is being told.
    """

    def __init__(self, listener: Listener, files: FileListener) -> None:
        """Stand in for nothing yet.

        Args:
            listener: Told what happens.
            files: Told of what is saved, loaded and shared.
        """
        self._listener = listener
        self._files = files
        self._thread = threading.get_ident()
        self._inside = False
        self._in_backward = False
        self.are_ops_own = False
        self._undo: list[Callable[[], None]] = []
        self._call = self._calling(nn.Module.__call__)
        graph = torch.autograd.graph
        forbid, dual = graph.disable_saved_tensors_hooks, forward_ad.enter_dual_level
        # Into what these call the compiler looks.
        self._of_uncompiled: list[tuple[Any, str, Any, Any]] = [
            (nn.Module, "__call__", nn.Module.__call__, self._call),
            (graph, "disable_saved_tensors_hooks", forbid, self._leaving(forbid, FORBIDS_HOOKS)),
            (forward_ad, "enter_dual_level", dual, self._leaving(dual, FORWARD_MODE)),
        ]
        self._direct_calls = DirectCalls(self._calling)
        self._own_methods = OwnMethods(self._method)
        self._sharing = Sharing(lambda tensor: self.tell(files.shares, tensor))
        self._in_compiled = self._watches_compiled = False

    def install(self) -> None:
        """Stand in for what tells of a training step; undone in children that the script forks."""
        for owner, name, _, stand_in in self._of_uncompiled:
            self._replace(owner, name, stand_in)
        self._direct_calls.install()
        self._sharing.install(self._replace)
        self._undo += [self._direct_calls.remove, self._own_methods.remove, self._sharing.remove]
        if "torch._dynamo.eval_frame" in sys.modules:
            self._watch_compiled()
        else:
            self._replace(torch, "compile", self._compiling(torch.compile))
        engine = getattr(torch.autograd, "_engine_run_backward")  # noqa: B009 - torch does not export it
        self._replace(torch.autograd, "_engine_run_backward", self._differentiating(engine))
        self._replace(nn.Module, "__reduce_ex__", self._copying(nn.Module.__reduce_ex__))
        for name in ("trace", "trace_module"):
            self._replace(torch.jit, name, self._tracing(getattr(torch.jit, name)))
        self._replace(Optimizer, "__init__", self._making(Optimizer.__init__))
        self._replace(Optimizer, "state_dict", self._saving(Optimizer.state_dict))
        self._replace(Optimizer, "load_state_dict", self._restoring(Optimizer.load_state_dict))
        load = self._loading(torch.load)
        self._replace(torch, "load", load)
        self._replace(torch.serialization, "load", load)
        STEPS.watch()
        STEPS.listeners.append(self._stepping)
        self._undo.append(lambda: STEPS.listeners.remove(self._stepping))
        os.register_at_fork(after_in_child=self.remove)

    def remove(self) -> None:
        """Put everything back."""
        while self._undo:
            self._undo.pop()()

    def _replace(self, owner: Any, name: str, stand_in: Any) -> None:
        original = getattr(owner, name)
        setattr(owner, name, stand_in)

        def put_back() -> None:
            if getattr(owner, name) is stand_in:
                setattr(owner, name, original)

        self._undo.append(put_back)

    def tell(self, told: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """Tell of something; where that fails, the script runs on without memfit, which says so.

        Args:
            told: What is told.
            args: Of what.
            kwargs: Likewise.

        Raises:
            UpdatesMadeError: Going on would be wrong.
        """
        if not self._undo:
            return
        try:
            with self._own_ops():
                told(*args, **kwargs)
        except UpdatesMadeError:
            raise  # going on would be wrong
        except Exception as error:  # noqa: BLE001 - the script must run as it would without memfit
            self.remove()
            self._listener.broke(error)

    @contextlib.contextmanager
    def _own_ops(self) -> Iterator[None]:
        """Ops inside this are memfit's."""
        outer, self.are_ops_own = self.are_ops_own, True
        try:
            yield
        finally:
            self.are_ops_own = outer

    def _calling(self, original: Callable[..., Any]) -> Callable[..., Any]:
        listener = self._listener

        @functools.wraps(original)
        def call(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
            # In backward a checkpoint calls modules again, and stops them by an exception.
            if self._inside or self._in_backward or threading.get_ident() != self._thread:
                return original(module, *args, **kwargs)
            self._inside = True
            try:
                self.tell(listener.called, module, args, kwargs)
                result = original(module, *args, **kwargs)
                self.tell(listener.gave, result)
                return result
            except BaseException:
                self.tell(listener.failed)
                raise
            finally:
                self._inside = False
                self.tell(listener.returned)

        return call

    def _differentiating(self, original: Callable[..., Any]) -> Callable[..., Any]:
        listener = self._listener

        # The parameters are those of the engine, which torch calls by position.
        @functools.wraps(original)
        def run(*args: Any, **kwargs: Any) -> Any:
            if self._in_backward or self.are_ops_own or threading.get_ident() != self._thread:
                return original(*args, **kwargs)
            self._in_backward = True
            creates_graph = bool(args[3]) if len(args) > 3 else False  # noqa: PLR2004
            accumulates = bool(kwargs.get("accumulate_grad"))
            try:
                self.tell(
                    listener.backward_begins,
                    tuple(args[0]),
                    accumulates=accumulates,
                    creates_graph=creates_graph,
                    inputs=tuple(args[4]) if len(args) > 4 else (),  # noqa: PLR2004
                )
                return original(*args, **kwargs)
            finally:
                self._in_backward = False
                self.tell(listener.backward_ended)

        return run

    def _leaving(self, original: Callable[..., Any], why: tuple[str, str]) -> Callable[..., Any]:
        @functools.wraps(original)
        def leave(*args: Any, **kwargs: Any) -> Any:
            is_own = self._in_backward or self.are_ops_own or self._in_compiled
            if not (is_own or is_traced()) and threading.get_ident() == self._thread:
                self.tell(self._listener.forbids_watching, why)
            return original(*args, **kwargs)

        return leave

    def _making(self, original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def make(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
            is_first = "torch._dynamo" not in sys.modules  # which the first one made imports
            with collected_once() if is_first else contextlib.nullcontext():
                original(optimizer, *args, **kwargs)
            if threading.get_ident() == self._thread and self._undo:
                self._own_methods.watch(type(optimizer))
                self.tell(self._listener.optimizer_made, optimizer)

        return make

    def _method(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        listener = self._listener

        @functools.wraps(original)
        def run(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
            is_being_made = "param_groups" not in vars(optimizer)  # it looks at its settings first
            if is_being_made or threading.get_ident() != self._thread:
                return original(optimizer, *args, **kwargs)
            self.tell(listener.method_begins, optimizer, name)
            try:
                return original(optimizer, *args, **kwargs)
            finally:
                self.tell(listener.method_ended, optimizer, name)

        return run

    def _copying(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def reduce(module: nn.Module, *args: Any) -> Any:
            if not self._in_backward and threading.get_ident() == self._thread:
                self.tell(self._listener.copies)
            return original(module, *args)

        return reduce

    def _tracing(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def trace(*args: Any, **kwargs: Any) -> Any:
            if not (self._inside or self._in_backward) and threading.get_ident() == self._thread:
                self.tell(self._listener.traces)
            return original(*args, **kwargs)

        return trace

    def _saving(self, original: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
        @functools.wraps(original)
        def save(optimizer: Optimizer, *args: Any, **kwargs: Any) -> dict[str, Any]:
            if threading.get_ident() != self._thread:
                return original(optimizer, *args, **kwargs)
            self.tell(self._files.saves, optimizer)
            try:
                return original(optimizer, *args, **kwargs)
            finally:
                self.tell(self._files.saved)

        return save

    def _restoring(self, original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def restore(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
            original(optimizer, *args, **kwargs)
            if threading.get_ident() == self._thread:
                self.tell(self._files.state_loaded, optimizer)

        return restore

    def _loading(self, original: Callable[..., Any]) -> Callable[..., Any]:
        files = self._files

        @functools.wraps(original)
        def load(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
            if self._inside or threading.get_ident() != self._thread:
                return original(f, map_location, *args, **kwargs)
            call = LoadCall(f, map_location, kwargs.get("mmap"))
            self.tell(files.loads, call)
            if not call.place:
                return original(f, map_location, *args, **kwargs)
            result = original(f, call.restored, *args, **kwargs)
            self.tell(files.loaded, call)
            return result

        return load

    def _compiling(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def compile_(*args: Any, **kwargs: Any) -> Any:
            compiled = original(*args, **kwargs)
            if self._undo:
                self._watch_compiled()
            return compiled

        return compile_

    def _watch_compiled(self) -> None:
        """Know when something compiled begins and ends: both set the evaluation of frames."""
        eval_frame = sys.modules.get("torch._dynamo.eval_frame")
        if eval_frame is None or self._watches_compiled:
            return
        self._watches_compiled = True
        begins, sets = eval_frame._callback_from_stance, eval_frame._maybe_set_eval_frame

        def begin(callback: Any) -> Any:
            if callable(callback) and threading.get_ident() == self._thread:
                self._compiled_begins()
            return begins(callback)

        def set_(callback: Any) -> Any:
            before = sets(callback)
            if not callable(callback) and threading.get_ident() == self._thread:
                self._compiled_ended()
            return before

        self._replace(eval_frame, "_callback_from_stance", begin)
        self._replace(eval_frame, "_maybe_set_eval_frame", set_)

    def _compiled_begins(self) -> None:
        if self._in_compiled or self._in_backward or not self._undo:
            return
        self._in_compiled = True
        self.tell(self._listener.compiled_runs)
        for owner, name, original, stand_in in self._of_uncompiled:
            if getattr(owner, name) is stand_in:
                setattr(owner, name, original)

    def _compiled_ended(self) -> None:
        if not self._in_compiled:
            return
        self._in_compiled = False
        for owner, name, original, stand_in in self._of_uncompiled if self._undo else ():
            if getattr(owner, name) is original:
                setattr(owner, name, stand_in)

    def _stepping(self, when: str, optimizer: Optimizer) -> None:
        if threading.get_ident() != self._thread:
            return
        listener = self._listener
        if when == "after":
            self.tell(listener.optimizer_ended, optimizer)
            return
        if when == "before":
            self.tell(listener.optimizer_begins, optimizer)
        if self._undo and (when == "closed" or not STEPS.has_arguments):
            # Not told: after half of the updates there is no going on as if nothing had been.
            with self._own_ops():
                listener.updates(optimizer)
            self.tell(listener.optimizer_works)
