"""A look names who holds each block: the variable, or the graph behind it."""

from __future__ import annotations

import collections
import contextvars
import dataclasses
import functools
import gc
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FunctionType
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from memfit import _native
from memfit.libraries import PACKAGE
from memfit.track import cpu
from memfit.track.look import NAMES, OF_BACKWARD, _cast_begin, _is_cast, look
from memfit.track.looks import LOOKS, SHARE, Looks
from memfit.track.owners import OWNERS

MODEL = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))


@pytest.fixture(autouse=True)
def counting() -> None:
    assert cpu.start() is None


def held(tensor: torch.Tensor) -> tuple[str, str]:
    """Category and owner of a tensor's block."""
    found = look()
    address = tensor.untyped_storage().data_ptr()
    return found.categories[address], NAMES.owner(found.owners[address]).name


@dataclasses.dataclass
class Record:
    value: Any


class Slots:
    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


class ModuleEach:
    """As Cython's functions: each says what module it is of, and their class has no name of one."""

    __module__ = property(lambda self: __name__)

    def __init__(self, value: Any) -> None:
        self.value = value


class Holder:
    def __init__(self, value: Any) -> None:
        self.kept = [value]

    def method(self) -> None: ...


def closure(value: Any) -> Callable[[], Any]:
    return lambda: value


def generator(value: Any) -> Iterator[Any]:
    yield 1
    yield value


def begun(value: Any) -> Iterator[Any]:
    running = generator(value)
    next(running)
    return running


def hooked(value: Any) -> nn.Module:
    module = nn.Identity()
    module.register_forward_hook(lambda *_: value)
    return module


def buffered(value: torch.Tensor) -> nn.Module:
    module = nn.Identity()
    module.register_buffer("loss", value)
    return module


FORMS: dict[str, Callable[[Any], Any]] = {
    "list": lambda v: [v],
    "tuple": lambda v: [(3, v)],
    "dict": lambda v: [{"loss": v, "n": 1}],
    "dict of lists": lambda v: collections.defaultdict(list, loss=[v]),
    "deque": lambda v: collections.deque([v], maxlen=3),
    "set": lambda v: {v},
    "dataclass": Record,
    "slots": Slots,
    "object": Holder,
    "class without a module's name": ModuleEach,
    "bound method": lambda v: Holder(v).method,
    "closure": closure,
    "partial": lambda v: functools.partial(print, v),
    "generator": begun,
    "hook": hooked,
    "arithmetic": lambda v: 0.9 * v + 0.1,
    "smallest": lambda v: torch.minimum(v, torch.tensor(5.0)),
    "stacked": lambda v: torch.cat([v[None], v[None]]),
    "node": lambda v: [v.grad_fn],
    "buffer": buffered,
}


@pytest.mark.parametrize("form", FORMS)
def test_the_graph_of_a_kept_value_is_named(form: str):
    def keep() -> tuple[Any, torch.Tensor]:
        hidden = MODEL[0](torch.randn(64, 8))
        activated = MODEL[1](hidden)
        return FORMS[form](MODEL[2](activated).mean()), activated.detach()

    kept, saved = keep()
    category, owner = held(saved)
    # The detached alias is a variable too: of several things, a block is what a graph holds.
    assert category == "activation"
    assert owner.startswith(("the autograd graph of `kept", "`saved`"))
    assert kept is not None
    del saved


def fail(value: Any) -> None:
    raise ValueError(value.shape)


def raised(value: Any) -> Exception | None:
    try:
        fail(value)
    except ValueError as error:
        return error
    return None


OF_TENSORS: dict[str, Callable[[Any], Any]] = {
    **dict(list(FORMS.items())[:-5]),
    "array": lambda v: [v.numpy()],
    "part of an array": lambda v: (1, v.numpy()[3:]),
    "array in a dict": lambda v: [{"predictions": v.numpy(), "n": 1}],
    "array of objects": lambda v: np.array([1, v, None], dtype=object)[1:],
    "exception": raised,
    "exceptions": lambda v: {"errors": [(1, raised(v))]},
}


@pytest.mark.parametrize("form", OF_TENSORS)
def test_a_kept_tensor_is_named(form: str):
    value = torch.zeros(100)
    address = value.untyped_storage().data_ptr()
    kept = OF_TENSORS[form](value)
    del value
    found = look()
    assert found.categories[address] == "variable"
    assert NAMES.owner(found.owners[address]).name.startswith("`kept")
    assert "(test_look.py:" in NAMES.owner(found.owners[address]).name
    assert kept is not None


def recursion() -> RecursionError | None:
    def deeper(tensor: torch.Tensor) -> None:
        deeper(tensor)

    try:
        deeper(torch.zeros(100))
    except RecursionError as error:
        return error
    return None


def test_the_traceback_of_a_deep_recursion_is_walked_through():
    kept = recursion()
    found = look()
    assert any(one.variable.name == "kept" for one in found.walk.in_tracebacks)
    assert kept is not None


def test_what_a_context_variable_holds_is_named():
    kept: contextvars.ContextVar[Any] = contextvars.ContextVar("history")
    value = torch.zeros(100)
    address = value.untyped_storage().data_ptr()
    kept.set([value])
    del value
    found = look()
    assert NAMES.owner(found.owners[address]).name == "`history` (a context variable)"
    kept.set(None)


class SelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cache: Any = None


def shelved(value: Any) -> type:
    return type("Shelf", (), {"kept": [value], "__module__": __name__})


NAMED = {
    "slots": (lambda v: Slots([v]), "`kept.value`"),
    "closure": (lambda v: closure([v]), "`kept.value`"),
    "class": (shelved, "`kept.kept`"),
}


@pytest.mark.parametrize("form", NAMED)
def test_what_holds_a_tensor_in_something_else_has_a_name(form: str):
    value = torch.zeros(100)
    address = value.untyped_storage().data_ptr()
    hold, name = NAMED[form]
    kept = hold(value)
    del value
    found = look()
    assert NAMES.owner(found.owners[address]).name.startswith(f"{name} (test_look.py:")
    assert kept is not None


def through(call: Callable[[], Any]) -> Any:
    return call()


def run() -> Any:
    args = torch.zeros(100)
    return args.data_ptr(), look()


def in_file(function: Callable[..., Any], file: str) -> Callable[..., Any]:
    return FunctionType(function.__code__.replace(co_filename=file), globals())


def test_what_torch_holds_in_an_op_that_memfit_runs_is_of_the_line_that_called_it():
    of_torch = in_file(run, f"{Path(torch.__file__).parent}/made_up.py")
    address, found = in_file(through, f"{PACKAGE}apply/made_up.py")(of_torch)
    owner = NAMES.owner(found.owners[address]).name
    assert owner.startswith("a value of test_look.py:")


def test_what_an_attention_caches_is_a_kv_cache():
    layer = SelfAttention()
    layer.cache = (torch.zeros(5), torch.zeros(5))
    assert held(layer.cache[0])[0] == "kv_cache"


def test_parameters_gradients_and_datasets_are_what_they_are():
    weight = torch.nn.Parameter(torch.ones(10))
    weight.sum().backward()
    assert weight.grad is not None
    assert held(weight)[0] == "parameter"
    assert held(weight.grad)[0] == "gradient"
    rows = torch.zeros(50)
    data = TensorDataset(rows)
    assert held(rows)[0] == "dataset"
    past_key_values = [(torch.zeros(5), torch.zeros(5))]
    assert held(past_key_values[0][0])[0] == "kv_cache"
    assert len(data) == 50


def test_modules_are_found_though_no_hook_saw_their_parameters():
    import copy

    model = copy.deepcopy(MODEL)
    look()
    assert any(owner is model[0] for owner in OWNERS._live())


def test_what_autocast_keeps_is_named():
    with torch.autocast("cpu", torch.bfloat16):
        loss = MODEL(torch.randn(16, 8)).sum()
        saved = loss.grad_fn.next_functions[0][0]
        found = look()
    assert saved is not None
    casts = [a for a, category in found.categories.items() if category == "cast_cache"]
    assert max(found.sizes[address] for address in casts) == MODEL[0].weight.numel() * 2


def test_a_parameter_in_double_precision_is_not_autocasts():
    total = MODEL[0].weight.double().abs().sum()
    found = look()
    assert total.grad_fn is not None
    assert "cast_cache" not in found.categories.values()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_copy_of_a_parameter_is_known_by_its_numbers_and_not_by_its_size(dtype: torch.dtype):
    weight = MODEL[0].weight
    with torch.autocast("cpu", dtype):
        begin = _cast_begin(weight)
    cast, other = weight.detach().to(dtype), torch.randn_like(weight).to(dtype)
    assert _is_cast(cast.data_ptr(), {begin})
    assert not _is_cast(other.data_ptr(), {begin})
    assert not _is_cast(8, {begin}), "there is no memory"


class Proud:
    """An object that must not be asked anything."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(name)

    def __bool__(self) -> bool:
        raise AssertionError

    def __len__(self) -> int:
        raise AssertionError

    def __eq__(self, other: object) -> bool:
        raise AssertionError

    def __hash__(self) -> int:
        raise AssertionError

    @property
    def value(self) -> Any:
        raise AssertionError


def test_a_look_runs_none_of_the_programs_code_and_keeps_nothing():
    unpacked = []
    proud = Proud()
    gone = weakref.ref(proud)
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: t, unpacked.append)
    with hooks:
        loss = MODEL(torch.randn(4, 8)).sum()
    module = nn.Identity()
    module.proud = proud  # type: ignore[assignment]
    gc.collect()
    gc.disable()
    try:
        look()
        del proud, module
        assert gone() is None
    finally:
        gc.enable()
    assert unpacked == []
    assert loss.requires_grad


def test_a_list_of_many_numbers_is_not_walked_through():
    before = look().walk._visited  # what else the process holds
    rows = [{"id": number, "text": str(number)} for number in range(30_000)]
    tensor = torch.zeros(10)
    found = look()
    assert not found.walk.is_complete
    assert found.walk._visited - before < 20_000
    assert tensor.untyped_storage().data_ptr() in found.categories
    assert len(rows) == 30_000


def test_looks_come_early_in_a_script_that_is_soon_over_and_rarely_in_a_long_one():
    looks = Looks()
    looks._started, looks._ended, looks._last_seconds = 100.0, 100.5, 0.01
    looks._spent_seconds = 0.02
    assert looks._next() == pytest.approx(100.58)
    looks._spent_seconds = 0.2
    assert looks._next() == pytest.approx(100 + 0.21 * SHARE)


def test_what_a_backward_made_is_named_though_a_look_comes_before_its_end_is_told():
    window = cpu.Window()
    LOOKS.add(window)
    try:
        LOOKS.backward_begins()
        _native.switch_alarm_off()  # as in the engine, where no Python runs
        since = _native.last_event() + 1
        gradient = torch.empty(1 << 24)
        del gradient
        LOOKS.look(since=since)
        _, found = LOOKS._windows[window]
        LOOKS.backward_ended()
    finally:
        LOOKS.remove(window)
        window.close()
    assert found is not None
    assert OF_BACKWARD in [one.owner.name for one in found.holdings]
    assert found.by_category["temporary"] == 1 << 26


@pytest.fixture
def looks_taken(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Looks taken for a window, which take long and can tell of no peak."""
    monkeypatch.setitem(Looks.tell.__globals__, "_TOLD", 2.0)
    window = cpu.Window()
    taken: list[int] = []
    LOOKS.add(window)
    monkeypatch.setattr(LOOKS, "_rise_seconds", 1e6)
    monkeypatch.setattr(LOOKS, "_spent_seconds", 1e6)
    listener = lambda: taken.append(_native.counted_bytes())  # noqa: E731
    LOOKS.listeners.append(listener)
    try:
        LOOKS._set_alarm()
        yield taken
    finally:
        LOOKS.listeners.remove(listener)
        LOOKS.remove(window)
        window.close()


def test_what_rises_again_and_again_for_one_op_is_looked_at_once_where_looks_take_long(
    looks_taken: list[int],
):
    logits, labels = torch.zeros(1 << 12, 1 << 9), torch.zeros(1 << 12, dtype=torch.long)
    taken = len(looks_taken)
    for _ in range(10):  # in which torch makes another tensor of that size, and lets go of it
        torch.nn.functional.cross_entropy(logits, labels)
    assert len(looks_taken) == taken + 1
    higher = torch.empty(1 << 24)
    assert len(looks_taken) == taken + 2, "above every peak that was looked at"
    del higher
