"""The guard: what it refuses, what it counts, and how it says so."""

from __future__ import annotations

import gc
import mmap
import random
import threading

import numpy as np
import pytest
import torch
from alone import alone
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import memfit
from memfit import _native
from memfit.track import cpu
from quantised import QuantisedLinear

PAGE = mmap.PAGESIZE
MIB = 1 << 20


@pytest.fixture(autouse=True)
def counting() -> None:
    assert cpu.start() is None


def room(size: int) -> memfit.guard.guard.Guard:
    """A guard that leaves so many bytes above what is in use."""
    gc.collect()  # what earlier errors still hold must not go in the middle of a test
    return memfit.guard(_native.taken_bytes() + size)


def empty(size: int) -> Tensor:
    return torch.empty(size, dtype=torch.uint8)


def test_a_request_is_refused_within_one_page_of_the_budget():
    with room(50 * MIB + 12_345) as guard:
        keep = [empty(3 * MIB + 7 * k) for k in range(12)]
        low, high = 0, 50 * MIB // PAGE
        while high - low > 1:
            middle = (low + high) // 2
            try:
                empty(MIB + middle * PAGE)
                low = middle
            except RuntimeError:
                high = middle
        last = empty(MIB + low * PAGE)
        assert 0 <= guard.budget_bytes - guard.in_use_bytes < PAGE
        with pytest.raises(RuntimeError, match="tried to allocate"):
            empty(MIB)
    del keep, last


def test_what_is_counted_is_what_the_system_gives():
    """Mapped and resident private bytes of the process, to the page, as Linux counts them."""
    found = alone("""
        sizes = [256 * 1024 + 4096 * (k * 37 % 200) + k * 13 % 5 for k in range(64)]
        room = [bytes(1000) for _ in range(200)]  # less than any tensor
        pin = room.pop()  # above it: what Python needs for itself is free in the heap now
        del room
        with memfit.guard("1GiB") as guard:
            before = guard.in_use_bytes, status("VmData"), status("RssAnon")
            keep = [torch.ones(size, dtype=torch.uint8) for size in sizes]
            after = guard.in_use_bytes, status("VmData"), status("RssAnon")
        answer(growth=[b - a for a, b in zip(before, after)])
    """)
    counted, mapped, resident = found["growth"]
    assert counted > 40 * MIB
    assert mapped == counted
    # The list and its tensors are Python's own.
    assert counted <= resident <= counted + MIB // 4


def test_threads_that_hammer_never_exceed_the_budget():
    """Eight threads; the judge is the system's count of resident private memory."""
    found = alone("""
        def hammer(seed):
            held = []
            for k in range(300):  # enough for all to be refused, also where they run in turn
                try:
                    size = 300_000 + (seed * 977 + k * 131) % 3_000_000
                    held.append(torch.ones(size, dtype=torch.uint8))
                    served.append(1)
                except RuntimeError:
                    refused.append(1)
                    del held[: len(held) // 2 + 1]
        def judge():
            while not over:
                worst[0] = max(worst[0], status("RssAnon"))
        served, refused, over, worst = [], [], [], [0]
        threads = [threading.Thread(target=hammer, args=(seed,)) for seed in range(8)]
        watching = threading.Thread(target=judge)
        base, in_use = status("RssAnon"), _native.taken_bytes()
        with memfit.guard(in_use + 48 * MIB) as guard:
            watching.start()
            for thread in threads: thread.start()
            for thread in threads: thread.join()
            over.append(1)
            watching.join()
            gc.collect()
        after = _native.taken_bytes()
        answer(growth=worst[0] - base, left=after - in_use, served=len(served),
               refused=len(refused))
    """)
    assert found["refused"] > 50
    assert found["served"] > 300
    # Stacks and Python's own objects of nine threads are not tensors.
    assert 40 * MIB < found["growth"] <= 48 * MIB + 3 * MIB
    assert found["left"] == 0


def test_freed_memory_is_used_again_and_goes_back_at_the_end():
    found = alone("""
        base = status("RssAnon")
        with memfit.guard("1GiB") as guard:
            before = guard.in_use_bytes
            addresses = []
            for _ in range(6):
                keep = [torch.ones(2 * MIB, dtype=torch.uint8) for _ in range(8)]
                addresses.append(sorted(t.data_ptr() for t in keep))
                highest = status("RssAnon")
                del keep
            kept = status("RssAnon")
            # Another size: what is kept must not come on top.
            other = torch.ones(12 * MIB, dtype=torch.uint8)
            mixed = status("RssAnon")
            del other
            in_use = guard.in_use_bytes - before
        answer(same=addresses[0] == addresses[-1], highest=highest - base, kept=kept - base,
               mixed=mixed - base, after=status("RssAnon") - base, in_use=in_use)
    """)
    assert found["same"]
    assert found["in_use"] == 0
    for name in ("highest", "kept", "mixed"):
        assert 15 * MIB < found[name] < 17 * MIB, found
    assert found["after"] < MIB


def test_pages_of_freed_blocks_serve_blocks_of_other_sizes():
    """The system hands out hardly any page once every size has been there; nothing grows."""
    found = alone("""
        from resource import RUSAGE_SELF, getrusage
        shapes = [(16, MIB), (4, 4 * MIB), (7, 2 * MIB + 300_000), (48, 350_000)]
        base = status("RssAnon")
        faults, highest = [], 0
        with memfit.guard("1GiB") as guard:
            before = guard.in_use_bytes
            for _ in range(8):
                start = getrusage(RUSAGE_SELF).ru_minflt
                for count, size in shapes:
                    keep = [torch.full((size,), k, dtype=torch.uint8) for k in range(count)]
                    highest = max(highest, status("RssAnon"))
                    for k, tensor in enumerate(keep):
                        assert bool((tensor == k).all()), (count, size, k)
                    del keep, tensor
                faults.append(getrusage(RUSAGE_SELF).ru_minflt - start)
            assert guard.in_use_bytes == before
        answer(faults=faults, highest=highest - base, after=status("RssAnon") - base)
    """)
    # Each size in turn needs the pages of all others: 64 MiB in each round, 16 000 pages of 4 KiB.
    assert found["faults"][0] > 16 * MIB // PAGE
    assert sum(found["faults"][4:]) / 4 < 6 * MIB // PAGE, found
    assert found["highest"] < 21 * MIB, found
    assert found["after"] < MIB


def test_threads_and_forks_see_their_own_values_while_pages_move():
    found = alone("""
        import random
        wrong, served = [], []
        def work(seed):
            rng, held = random.Random(seed), {}
            for k in range(250):
                slot = rng.randrange(6)
                if slot in held:
                    value, tensor = held.pop(slot)
                    if not (tensor.numpy() == value).all():
                        wrong.append(value)
                    continue
                value = rng.randrange(256)
                size = rng.choice([300_000, 700_000, 1_500_000, 3_000_000]) + rng.randrange(9) * 512
                try:
                    held[slot] = value, torch.full((size,), value, dtype=torch.uint8)
                    served.append(1)
                except RuntimeError:
                    held.clear()
        verdicts = []
        with memfit.guard(_native.taken_bytes() + 24 * MIB):
            threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
            for thread in threads: thread.start()
            for seed in range(4):
                child = os.fork()
                if child == 0:
                    wrong.clear()
                    work(100 + seed)
                    os._exit(len(wrong))
                verdicts.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
            for thread in threads: thread.join()
        answer(wrong=wrong, served=len(served), verdicts=verdicts)
    """)
    assert not found["wrong"]
    assert found["verdicts"] == [0] * 4
    assert found["served"] > 300


def test_the_error_names_numbers_holders_and_the_next_step():
    """In a process of its own: only there are these tensors the largest."""
    found = alone("""
        from torch import nn

        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.first = nn.Linear(1024, 1024)
                self.layers = nn.ModuleList([nn.Linear(512, 512)])
                self.register_buffer("mask", torch.zeros(600, 1000))

        model = Net()
        optimizer = torch.optim.AdamW(model.parameters())
        sum(p.sum() for p in model.parameters()).backward()
        optimizer.step()
        try:
            with memfit.guard(_native.taken_bytes() + 20 * MIB) as guard:
                [torch.empty(2 * MIB, dtype=torch.uint8) for _ in range(20)]
        except RuntimeError as error:
            answer(
                is_own=isinstance(error, memfit.OutOfBudget),
                is_memfits=isinstance(error, memfit.MemfitError),
                cause=type(error.__cause__).__name__,
                device=error.device,
                requested=error.requested_bytes,
                budget=error.budget_bytes,
                of_guard=guard.budget_bytes,
                in_use=error.in_use_bytes,
                holders=[(holder.name, [holder.bytes, holder.blocks]) for holder in error.holders],
                text=str(error),
                args=error.args,
            )
    """)
    assert found["is_own"]
    assert found["is_memfits"]
    assert found["cause"] == "RuntimeError"
    assert (found["device"], found["requested"]) == ("cpu", 2 * MIB)
    assert found["budget"] == found["of_guard"]
    assert found["budget"] - 2 * MIB - PAGE < found["in_use"] <= found["budget"]
    held = dict(found["holders"])
    assert len(held) == len(found["holders"]) <= 10
    linear = 4 * (1024 * 1024 + 1024)
    assert held["parameters of `Net.first`"] == [linear, 2]
    assert held["gradients of `Net.first`"] == [linear, 2]
    assert held["optimizer state (`AdamW`) of `Net.first`"] == [2 * linear + 8, 6]
    assert held["module buffers of `Net`"] == [2_400_000, 1]
    assert held["parameters of `Net.layers.0`"] == [4 * (512 * 512 + 512), 2]
    assert held["unlabelled, 2.0 MiB each"] == [18 * MIB, 9]
    assert str(found["budget"]) in found["text"]
    assert "memfit plan" in found["text"]
    # Programs know this error by torch's words, as the first of its arguments.
    (words,) = found["args"]
    assert "DefaultCPUAllocator: can't allocate memory" in words


@pytest.mark.parametrize("way", ["no_grad", "graph", "training"])
def test_the_next_step_is_that_of_what_runs(way):
    found = alone(f"""
        import contextlib
        from torch import nn

        model = nn.Linear(512, 64 * 1024, bias=False)
        optimizer = torch.optim.SGD(model.parameters()) if "{way}" == "training" else None
        kept = []
        mode = torch.no_grad() if "{way}" == "no_grad" else contextlib.nullcontext()
        try:
            with memfit.guard(_native.taken_bytes() + 40 * MIB), mode:
                for _ in range(40):
                    kept.append(model(torch.ones(16, 512)).tanh().square())
        except memfit.OutOfBudget as error:
            answer(hints=[line for line in str(error).splitlines() if line.startswith("hint: ")])
    """)
    hints = " ".join(found["hints"])
    assert ("--largest batch" in hints) == (way == "no_grad")
    assert ("torch.no_grad()" in hints) == (way == "graph")
    assert ("the training steps" in hints) == (way != "no_grad")


def test_code_that_catches_torchs_error_inside_goes_on_as_before():
    with room(8 * MIB):
        with pytest.raises(RuntimeError, match="DefaultCPUAllocator: can't allocate memory"):
            empty(9 * MIB)
        smaller = empty(4 * MIB)
    assert smaller.numel() == 4 * MIB


def test_other_errors_pass_as_they_are():
    with pytest.raises(ValueError, match="mine"), room(MIB):
        raise ValueError("mine")

    def refused_and_then_wrong() -> None:
        with room(8 * MIB):
            with pytest.raises(RuntimeError):
                empty(9 * MIB)
            torch.ones(2) @ torch.ones(3, 3)

    with pytest.raises(RuntimeError, match="cannot be multiplied") as caught:
        refused_and_then_wrong()
    assert not isinstance(caught.value, memfit.OutOfBudget)


def test_the_budget_ends_with_the_block_however_it_ends():
    for ending in (KeyError, memfit.OutOfBudget):
        with pytest.raises(ending), room(2 * MIB):
            empty(3 * MIB) if ending is memfit.OutOfBudget else {}["missing"]
        assert empty(8 * MIB).numel() == 8 * MIB


def test_of_nested_guards_the_tightest_counts():
    with room(16 * MIB):
        with room(4 * MIB):
            with room(64 * MIB), pytest.raises(RuntimeError):
                empty(6 * MIB)
            with pytest.raises(RuntimeError):
                empty(6 * MIB)
            keep = empty(2 * MIB)
        keep = empty(8 * MIB)
        with pytest.raises(RuntimeError):
            empty(16 * MIB)
    assert empty(20 * MIB).numel() > keep.numel()


def test_a_budget_below_what_lives_is_refused_at_once():
    keep = empty(4 * MIB)
    with pytest.raises(memfit.BudgetError, match=r"more than the budget of 1\.0 MiB"):
        memfit.guard("1MiB").__enter__()
    assert empty(8 * MIB).numel() > keep.numel()
    for wrong in ("60%", "much", -1):
        with pytest.raises(memfit.UsageError):
            memfit.guard(wrong)
    with room(MIB) as guard, pytest.raises(memfit.UsageError, match="on already"):
        guard.__enter__()


class Greedy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        empty(64 * MIB)
        return gradient


def test_a_refusal_inside_backward_comes_out_as_any_other():
    x = torch.ones(8, requires_grad=True)
    with pytest.raises(memfit.OutOfBudget) as caught, room(8 * MIB):
        Greedy.apply(x).sum().backward()
    assert caught.value.requested_bytes == 64 * MIB
    wide = torch.ones(MIB, requires_grad=True)
    loss = (wide.exp() * wide).sum()
    with pytest.raises(memfit.OutOfBudget) as caught, room(3 * MIB):
        loss.backward()
    assert caught.value.requested_bytes == 4 * MIB


def test_ops_on_several_openmp_threads_keep_to_the_budget():
    found = alone(
        """
        torch.set_num_threads(4)
        x = torch.randn(256, 4096)
        w = torch.randn(4096, 1024)
        free = (x @ w).softmax(1).sort(1).values.cumsum(0)
        tried = 0
        with memfit.guard(_native.taken_bytes() + 8 * MIB) as guard:
            guarded = (x @ w).softmax(1).sort(1).values.cumsum(0)
            for k in range(40):
                try:
                    torch.nn.functional.conv2d(torch.ones(k + 1, 8, 64, 64), torch.ones(8, 8, 3, 3))
                except RuntimeError as error:
                    assert "DefaultCPUAllocator" in str(error), error
                    tried += 1
            assert guard.in_use_bytes <= guard.budget_bytes
        answer(equal=bool(torch.equal(free, guarded)), tried=tried)
    """
    )
    assert found["equal"]
    assert found["tried"] > 5


def test_a_forked_child_keeps_to_the_budget_and_leaves_the_parents_count_alone():
    """Forks while other threads are in the middle of allocating."""
    found = alone("""
        stop, verdicts = [], []
        def busy():
            while not stop:
                torch.ones(400_000, dtype=torch.uint8)
        threads = [threading.Thread(target=busy) for _ in range(3)]
        with memfit.guard(_native.taken_bytes() + 16 * MIB) as guard:
            keep = torch.ones(4 * MIB, dtype=torch.uint8)
            for thread in threads: thread.start()
            for _ in range(20):
                child = os.fork()
                if child == 0:
                    code = 1
                    try:
                        mine = torch.ones(8 * MIB, dtype=torch.uint8)
                        code = 2
                        del mine
                        torch.ones(17 * MIB, dtype=torch.uint8)
                    except RuntimeError as error:
                        if code == 2 and guard.in_use_bytes <= guard.budget_bytes:
                            code = 0
                    os._exit(code)
                verdicts.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
            stop.append(1)
            for thread in threads: thread.join()
            in_use = guard.in_use_bytes
        answer(verdicts=verdicts, exact=in_use == _native.taken_bytes())
    """)
    assert found["verdicts"] == [0] * 20
    assert found["exact"]


class Hungry(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return empty(MIB if index < 2 else 32 * MIB)


def test_a_dataloaders_worker_keeps_to_the_budget_and_says_where():
    def load() -> None:
        with room(16 * MIB):
            for sample in DataLoader(Hungry(), batch_size=None, num_workers=1):
                assert sample.numel() == MIB

    with pytest.raises(memfit.OutOfBudget, match="in a process of a DataLoader") as caught:
        load()
    assert caught.value.requested_bytes == 32 * MIB


def test_a_track_and_a_guard_see_the_same_memory():
    model = nn.Linear(512, 512)
    with pytest.raises(memfit.OutOfBudget) as caught, memfit.track("all") as track:  # noqa: SIM117
        with room(6 * MIB):
            [empty(MIB) for _ in range(8)]
    assert track.peak_bytes - track.before_bytes == 5 * MIB
    assert caught.value.by_category["parameter"] >= sum(p.numel() * 4 for p in model.parameters())
    held = sum(caught.value.by_category.values())
    assert held == track.peak_bytes
    assert held <= caught.value.in_use_bytes <= held * 1.05 + MIB // 4


def test_the_backstop_stops_what_no_budget_counts_and_is_removed():
    found = alone("""
        import resource
        import numpy as np
        before = resource.getrlimit(resource.RLIMIT_DATA)
        def bounded():
            try:
                return np.ones(64 * MIB, dtype=np.uint8).size
            except MemoryError:
                return 0
        with memfit.guard("200MiB", backstop="32MiB"):
            tensor = torch.ones(100 * MIB, dtype=torch.uint8)
            del tensor
            _native.release_kept()
            held = np.ones(180 * MIB, dtype=np.uint8)
            within = bounded()
            try:
                torch.ones(150 * MIB, dtype=torch.uint8)
                refused = ""
            except RuntimeError as error:
                refused = str(error)
            system = _native.last_refusal()["is_by_system"]
            del held
        answer(within=within, refused=refused, system=system, outside=bounded(),
               restored=resource.getrlimit(resource.RLIMIT_DATA) == before)
    """)
    assert found["within"] == 0
    assert "DefaultCPUAllocator" in found["refused"]
    assert found["system"]
    assert found["outside"] == 64 * MIB
    assert found["restored"]


def test_random_requests_agree_with_a_plain_sum():
    """A naive twin: the sum of what each block took is what is in use, and decides refusals."""
    rng = random.Random(5)
    held: list[tuple[Tensor, int]] = []
    refused = 0
    with room(20 * MIB) as guard:
        base = guard.in_use_bytes
        for _ in range(3000):
            if held and rng.random() < 0.45:
                held.pop(rng.randrange(len(held)))
                continue
            size = rng.choice([rng.randrange(1, 4000), rng.randrange(4000, 2 * MIB)])
            before = guard.in_use_bytes
            try:
                held.append((empty(size), 0))
            except RuntimeError:
                refused += 1
                assert before + size + 2 * PAGE > guard.budget_bytes
                assert guard.in_use_bytes == before
                continue
            taken = guard.in_use_bytes - before
            held[-1] = (held[-1][0], taken)
            assert size < taken <= size + 2 * PAGE
            assert guard.in_use_bytes == base + sum(taken for _, taken in held)
        held.clear()
        assert guard.in_use_bytes == base
    assert refused > 50


def test_no_tensor_loses_its_values_when_blocks_are_used_again():
    with room(64 * MIB):
        rng = np.random.default_rng(1)
        held: dict[int, Tensor] = {}
        for k in range(400):
            slot = int(rng.integers(12))
            if slot in held:
                value = held.pop(slot)
                assert bool((value == value[0]).all())
                assert int(value[0]) == slot
            held[slot] = torch.full((400_000 + 1000 * (k % 5),), slot, dtype=torch.uint8)


def test_guards_in_several_threads_end_independently():
    ends: list[BaseException] = []
    started, over = threading.Event(), threading.Event()

    def inner() -> None:
        try:
            with room(4 * MIB):
                started.set()
                over.wait(20)
        except BaseException as error:  # noqa: BLE001 - the thread's verdict
            ends.append(error)

    thread = threading.Thread(target=inner)
    with room(32 * MIB):
        thread.start()
        assert started.wait(20)
        with pytest.raises(RuntimeError):
            empty(8 * MIB)
    # The wider guard has ended, the tighter one goes on.
    with pytest.raises(RuntimeError):
        empty(8 * MIB)
    over.set()
    thread.join()
    assert not ends
    assert empty(8 * MIB).numel() == 8 * MIB


def test_what_a_weight_wraps_is_named_by_its_module():
    width = 4096  # Only the largest holders are listed, and other tests left some.
    model = QuantisedLinear(width)
    with pytest.raises(memfit.OutOfBudget) as caught, room(MIB):
        empty(2 * MIB)
    (named,) = [holder for holder in caught.value.holders if "QuantisedLinear" in holder.name]
    assert named.bytes == width * width + 4 * width
    del model
