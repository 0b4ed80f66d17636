"""What a script does with tensors between steps, seen before it is done.

Responsible for seeing the first op on a parameter outside any module's call, which begins a step as
a call does: a method of the model's own that reads its weights, a scene of bare parameters that a
function renders. And for seeing how much memory is about to be taken, as models are made before the
first step. Not responsible for what follows (:mod:`memfit.run.script.script`,
:mod:`memfit.run.script.between_passes`).

A mode of torch functions sees every op before it runs, for a microsecond or two. So it is there
between steps only, and until all optimizers that were made have stepped, unless a step began by it.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from types import CodeType, FrameType, FunctionType
from typing import Any

from torch import Tensor
from torch._C import _get_function_stack_at, _len_torch_function_stack
from torch.overrides import TorchFunctionMode

from memfit.run.script.factories import about_to_take
from memfit.tensors.function_modes import torchs_own

Used = Callable[[Tensor, str, Any], None]
"""Told of a parameter, an op's name, and all that it is called with; gradients may be off."""

Takes = Callable[[int, bool], None]
"""Told of bytes that are about to be taken, and whether that may be a model's that is made."""

_COMPUTE = frozenset(
    """
    __add__ add addbmm addcdiv addcmul addmm addmv addr baddbmm bilinear bmm broadcast_to cat
    cdist chunk clamp complex concat concatenate conv1d conv2d conv3d conv_transpose1d
    conv_transpose2d conv_transpose3d cos cosine_similarity div dot einsum embedding
    embedding_bag erf exp expand expand_as fft_fft fft_fft2 fft_ifft fft_ifft2 fft_irfft
    fft_rfft fft_rfft2 flatten gather gelu __getitem__ grid_sample hstack index_select inner
    interpolate kron layer_norm lerp linear log log_softmax logsigmoid masked_select
    __matmul__ matmul mm movedim __mul__ mul multi_head_attention_forward multiply mv __neg__
    neg normalize outer pad permute __pow__ pow __radd__ __rdiv__ reciprocal relu repeat
    repeat_interleave reshape __rmatmul__ rms_norm __rmul__ __rpow__ rsqrt __rsub__
    __rtruediv__ scaled_dot_product_attention select sigmoid silu sin softmax softplus
    _sparse_mm special_expit split sqrt square squeeze stack __sub__ sub subtract swapaxes t
    take_along_dim tanh tensordot tile transpose tril triu __truediv__ unbind unflatten unfold
    unsqueeze view view_as_complex vstack where
    """.split()  # noqa: SIM905 - one name a line says no more
)
"""Functions that steps begin with.

Others are looks at a parameter (a norm to print, its size), or make or change one. Too much happens
between steps to tell a beginning by what it is not.
"""


class ParameterUses:
    """What sees them, from :meth:`watch` to :meth:`leave`."""

    def __init__(self, is_idle: Callable[[], bool], used: Used, takes: Takes) -> None:
        """Watch nothing yet.

        Args:
            is_idle: Whether a use would begin a step.
            used: Told of a use then.
            takes: Told of bytes that are about to be taken then.
        """
        self._is_idle = is_idle
        self._used = used
        self._takes = takes
        self._mode: _Uses | None = None
        self._is_left = False

    def watch(self, *, begin: bool = True) -> None:
        """See ops from now on, unless the script has a mode of its own: it takes off the last.

        Args:
            begin: Whether uses may begin a step; else what is about to be taken is told alone.
        """
        if self._mode is None and not _len_torch_function_stack():
            self._mode = _Uses(self._is_idle, self._used, self._takes)
            self._mode.__enter__()  # type: ignore[no-untyped-call]
        if self._mode is not None:
            self._mode.sees, self._mode.begin = True, begin

    def leave(self) -> None:
        """See none; the mode itself goes if none of the script's lies above it."""
        self._is_left = True
        if self._mode is None:
            return
        self._mode.sees = False
        if _top() is self._mode:
            self._mode.__exit__(None, None, None)
            self._mode = None

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """See none inside this, where the mode would be noticed, or cost more than what runs.

        What runs inside enters no function mode that stays. It may :meth:`leave` for good.
        """
        mode, self._mode = self._mode, None
        if mode is None or _top() is not mode:
            self._mode = mode
            yield
            return
        mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        self._is_left = False
        try:
            yield
        finally:
            if self._mode is None and not self._is_left:
                mode.__enter__()  # type: ignore[no-untyped-call]
                self._mode = mode


class _Uses(TorchFunctionMode):
    """Tells of ops on leaves that are trained, and of memory that is about to be taken."""

    def __init__(self, is_idle: Callable[[], bool], used: Used, takes: Takes) -> None:
        super().__init__()
        self.sees = self.begin = True
        self._is_idle = is_idle
        self._used = used
        self._takes = takes
        self._thread = threading.get_ident()

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs, func = kwargs or {}, torchs_own(func)
        if self.sees and self._is_idle() and threading.get_ident() == self._thread:
            size_bytes = about_to_take(func, args, kwargs)
            if size_bytes:
                self._takes(size_bytes, self.begin)
            elif self.begin:
                leaf = next(_leaves((*args, *kwargs.values())), None)
                name = getattr(func, "__name__", "")
                if leaf is not None and name in _COMPUTE:
                    self._used(leaf, name, (args, kwargs))
        return _called_from(sys._getframe(1))(func, args, kwargs)


_CALL = (lambda func, args, kwargs: func(*args, **kwargs)).__code__


def _called_from(frame: FrameType) -> Callable[..., Any]:
    """What calls a function from the line of the program that did.

    A warning of torch's is told of the frame that Python runs, and once for each line: that is to
    be the program's, not memfit's.

    Args:
        frame: That of the program.
    """
    return FunctionType(_call_at(frame.f_code, frame.f_lineno or 1), frame.f_globals)


@lru_cache(maxsize=1024)
def _call_at(code: CodeType, line: int) -> CodeType:
    return _CALL.replace(co_filename=code.co_filename, co_firstlineno=line)


def _top() -> Any:
    """The mode that sees an op first; ``None`` without one."""
    height = _len_torch_function_stack()
    return _get_function_stack_at(height - 1) if height else None


def trained(tensor: Tensor) -> Tensor | None:
    """The leaf of which a tensor is the whole or a view; ``None`` of others, or without gradients.

    Args:
        tensor: The tensor.
    """
    if not tensor.requires_grad:
        return None
    whole = tensor if tensor.is_leaf else tensor._base
    return whole if whole is not None and whole.is_leaf else None


def _leaves(given: Iterable[Any]) -> Iterator[Tensor]:
    """What is trained of tensors, themselves or in a list."""
    for it in given:
        if isinstance(it, Tensor):
            leaf = trained(it)
            if leaf is not None:
                yield leaf
        elif isinstance(it, (list, tuple)):
            yield from _leaves(it)
