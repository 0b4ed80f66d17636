"""What a script holds and never writes, read from files: same results in less memory."""

from __future__ import annotations

import pickle
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ran import inline
from torch import Tensor, nn

from memfit import _native
from memfit.options import Options
from memfit.run.script import held_in_files
from memfit.run.script.held_in_files import HELD_IN_FILES, HeldInFiles
from memfit.run.script.rare_writes import CALLS
from memfit.run.script.request import FitRequest
from memfit.run.script.shared_memory import Sharing
from memfit.tensors.storage import is_private_mapping
from memfit.track import cpu

MIB = 1 << 20

HOLDS = """
    import copy, torch
    from torch import nn

    torch.manual_seed(0)
    images = torch.rand(4096, 1024)
    model = nn.Sequential(nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, 1024))
    average = copy.deepcopy(model).requires_grad_(requires_grad=False)
    optimizer = torch.optim.Adam(model.parameters())
    loader = torch.utils.data.DataLoader(images, batch_size=512, shuffle=True, num_workers=WORKERS)
    best = None
    for step, data in enumerate(loader):
        loss = nn.functional.mse_loss(model(data), data)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for a, p in zip(average.parameters(), model.parameters()):
                a.lerp_(p, 0.1)
        if step == 2:
            best = copy.deepcopy(model.state_dict())
        if step == 4:
            images.resize_(4096, 1024)
        print(repr(loss.item()))
    model.load_state_dict(best)
    torch.save([model.state_dict(), average.state_dict(), images], "end.pt")
"""


@pytest.mark.parametrize("workers", [0, 2])
def test_a_data_set_and_copies_of_weights_leave_room_for_the_step(tmp_path: Path, workers: int):
    """16 MiB of data and 4 of an average, beside steps of 20 MiB; loaders' workers see them too."""
    (tmp_path / "disk").mkdir()
    ran = inline(
        tmp_path, "28MiB", HOLDS.replace("WORKERS", str(workers)), offload=str(tmp_path / "disk")
    )
    (loop,) = ran.loops
    assert HELD_IN_FILES in loop["notes"]
    assert ran.report["fitting"]["verdict"]["kept"], ran.stderr
    assert list((tmp_path / "disk").iterdir()) == []


def test_nothing_goes_where_nothing_may(tmp_path: Path):
    ran = inline(tmp_path, "28MiB", HOLDS.replace("WORKERS", "0"))
    (loop,) = ran.loops
    assert HELD_IN_FILES not in loop["notes"]
    assert "over the budget" in ran.stderr


def is_mapped(tensor: Tensor) -> bool:
    return not _native.is_counted(tensor.untyped_storage().data_ptr())


def large() -> Tensor:
    return torch.rand(1 << 16)


def place(held: HeldInFiles, *inputs: Any, model: nn.Module | None = None) -> str:
    return held.place(MIB, [] if model is None else [model], inputs)


def test_what_somebody_else_sees_or_writes_stays(held: HeldInFiles):
    model = nn.BatchNorm1d(1 << 16)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.rand(2, 1 << 16)).sum().backward()
    optimizer.step()
    goes, viewed, shown, shared, given = large(), large(), large(), large(), large()
    view, array = viewed[1:], shown.numpy()
    shared.share_memory_()
    imaginary = torch.rand(1 << 16, dtype=torch.complex64).conj()
    with torch.inference_mode():
        inferred = large()
    assert place(held, given, model=model)
    assert is_mapped(goes)
    state = [it for entry in optimizer.state.values() for it in entry.values()]
    gradients = [parameter.grad for parameter in model.parameters()]
    others = [shown, given, inferred, *state, *gradients, *model.parameters()]
    others += [model.running_mean, model.running_var]
    assert not any(is_mapped(it) for it in others if it is not None and it.numel() > 1)
    assert is_mapped(viewed)
    assert view.data_ptr() == viewed[1:].data_ptr()
    assert (view == viewed[1:]).all()
    assert (array == shown.numpy()).all()
    assert imaginary.is_conj()


def test_what_torch_has_read_goes_unless_others_see_it(held: HeldInFiles, tmp_path: Path):
    """It cannot be resized, as what numpy lends cannot be, but torch's allocator has it back."""
    torch.save([large() for _ in range(6)], tmp_path / "saved.pt")
    kept, shown, was_shown, lent, shared, again = torch.load(tmp_path / "saved.pt")
    assert not kept.untyped_storage().resizable()
    array = shown.numpy()
    was_shown.numpy()
    capsule = lent.__dlpack__()
    shared.share_memory_()
    from_file = torch.load(tmp_path / "saved.pt", mmap=True)[0]
    # Two tensors in one memory, of which torch has two objects.
    twin, known = torch.from_numpy(again.numpy()), kept.clone()
    addresses = [from_file.data_ptr(), shared.data_ptr()]
    assert place(held)
    assert is_mapped(kept)
    assert is_mapped(was_shown)
    assert torch.equal(kept, known)
    assert not any(is_mapped(it) for it in (shown, lent, again, twin))
    assert addresses == [from_file.data_ptr(), shared.data_ptr()]
    shown[0], again[0] = 7, 8
    assert array[0] == 7
    assert twin[0] == 8
    del capsule


def test_what_an_array_alone_holds_stays(held: HeldInFiles):
    """``model(x).numpy()``: the tensor has one owner, and the array reads its memory."""
    arrays = [large().numpy(), np.asarray(large()), large().reshape(256, 256).numpy()[3:]]
    known = [it.copy() for it in arrays]
    goes = large()
    place(held)
    place(held)
    assert is_mapped(goes)
    taken_again = [large() for _ in range(8)]
    assert all((array == it).all() for array, it in zip(arrays, known, strict=True))
    del taken_again


def test_arrays_made_of_tensors_are_read_on(tmp_path: Path):
    """8 MiB of data in an array, a teacher's answers in another, and predictions in more."""
    (tmp_path / "disk").mkdir()
    ran = inline(
        tmp_path,
        "16MiB",
        """
    import torch
    from torch import nn

    torch.manual_seed(0)
    images = torch.rand(2048, 1024).numpy()
    model = nn.Sequential(nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, 64))
    teacher = nn.Linear(1024, 64)
    with torch.no_grad():
        soft = teacher(torch.from_numpy(images)).numpy()
    optimizer = torch.optim.Adam(model.parameters())
    answers = []
    for step in range(8):
        rows = slice(step * 256, (step + 1) * 256)
        answer = model(torch.from_numpy(images[rows].copy()))
        loss = nn.functional.mse_loss(answer, torch.from_numpy(soft[rows].copy()))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        answers.append(answer.detach().numpy())
        print(repr(loss.item()))
    print([float(it.sum()) for it in (images, soft, *answers)])
    """,
        offload=str(tmp_path / "disk"),
    )
    (loop,) = ran.loops
    assert HELD_IN_FILES in loop["notes"]


def test_a_file_that_an_array_reads_stays_there(held: HeldInFiles, tmp_path: Path):
    """A parameter made of it would come back, and leave the array no memory."""
    torch.save(large(), tmp_path / "saved.pt")
    loaded = [torch.load(tmp_path / "saved.pt")]
    place(held)
    parameter, array = nn.Parameter(loaded[0]), loaded[0].numpy()
    known = array.copy()
    assert is_mapped(parameter)
    held.optimizer_made(torch.optim.SGD([parameter], 0.1))
    held.shares(loaded[0])
    assert is_mapped(parameter)
    assert (array == known).all()
    del array
    held.optimizer_made(torch.optim.SGD([parameter], 0.1))
    assert not is_mapped(parameter)
    assert parameter.data_ptr() == loaded[0].data_ptr()
    assert (parameter.detach().numpy() == known).all()


def test_what_dlpack_lends_stays(held: HeldInFiles):
    lent, written = large(), large()
    array = np.from_dlpack(lent)
    assert place(held)
    assert is_mapped(written)
    lent[0] = 7
    assert array[0] == 7
    shown = np.from_dlpack(written)
    written[0] = 7
    place(held)
    written[0] = 8
    assert shown[0] == 8


def test_bytes_hooks_and_versions_are_as_before(held: HeldInFiles):
    odd = torch.rand(300, 400).t()[:, 7:]
    whole = [
        large(),
        odd.clone(memory_format=torch.preserve_format),
        nn.Parameter(large(), requires_grad=False),
    ]
    before = [(it.clone(), it.stride(), it._version, id(it), type(it)) for it in whole]
    live = _native.counted_bytes()
    assert place(held)
    assert live - _native.counted_bytes() >= sum(it.nbytes for it in whole)
    for it, (copy, *known) in zip(whole, before, strict=True):
        assert is_mapped(it)
        assert torch.equal(it, copy)
        assert [it.stride(), it._version, id(it), type(it)] == known


def test_an_input_goes_once_it_has_stayed_for_a_step(held: HeldInFiles):
    held_input, passing = large(), large()
    other = large()
    place(held, held_input)
    assert is_mapped(other)
    assert not is_mapped(held_input)
    del passing
    place(held, held_input)
    assert is_mapped(held_input)


def test_what_was_read_for_another_model_goes_at_once(held: HeldInFiles):
    place(held)
    fresh = large()
    place(held)
    assert not is_mapped(fresh), "it may be one of a kind that each step makes"
    read, passing = large(), large()
    held.look_anew()
    place(held, passing)
    assert is_mapped(read)
    assert not is_mapped(passing)


def test_garbage_of_a_run_before_leaves_room_for_the_next(tmp_path: Path):
    """8 MiB of weights and state of a model that holds itself, beside steps of 16 MiB."""
    ran = inline(
        tmp_path,
        "22MiB",
        """
    import torch
    from torch import nn

    def run():
        model = nn.Sequential(nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, 1024))
        model.of = [model]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for step in range(4):
            x = torch.rand(256, 1024)
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), x)
            loss.backward()
            optimizer.step()
            print(repr(loss.item()))

    torch.manual_seed(0)
    run()
    run()
    """,
    )
    assert ran.fitting["verdict"]["kept"], ran.stderr


def test_the_frames_of_a_replay_memory_leave_room_for_the_step(tmp_path: Path):
    """12 MiB in 384 states of 32 KiB, beside steps of 18 MiB."""
    (tmp_path / "disk").mkdir()
    ran = inline(
        tmp_path,
        "24MiB",
        """
    import random, torch
    from torch import nn

    torch.manual_seed(0)
    random.seed(0)
    memory = [torch.rand(1, 8192) for _ in range(384)]
    model = nn.Sequential(nn.Linear(8192, 128), nn.ReLU(), nn.Linear(128, 4))
    optimizer = torch.optim.Adam(model.parameters())
    for step in range(6):
        states = torch.cat(random.sample(memory, 32))
        loss = model(states).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(repr(loss.item()))
    """,
        offload=str(tmp_path / "disk"),
    )
    (loop,) = ran.loops
    assert HELD_IN_FILES in loop["notes"]
    assert loop["plan"]["predicted_peak_bytes"] < 20 * MIB
    assert ran.report["fitting"]["verdict"]["kept"], ran.stderr


def test_what_an_agent_has_seen_leaves_room_for_each_rows_steps(tmp_path: Path):
    """8 MiB that are written before each row of steps of 20 MiB."""
    (tmp_path / "disk").mkdir()
    ran = inline(
        tmp_path,
        "25MiB",
        """
    import torch
    from torch import nn

    torch.manual_seed(0)
    seen = torch.zeros(32, 16, 4096)
    model = nn.Sequential(nn.Linear(4096, 512), nn.ReLU(), nn.Linear(512, 4))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for rollout in range(4):
        for at in range(32):
            seen[at] = torch.rand(16, 4096)
            with torch.no_grad():
                model(seen[at])
        flat = seen.reshape(-1, 4096)
        for part in range(6):
            loss = model(flat[torch.randperm(512)[:128]] / 2).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            print(repr(loss.item()))
    """,
        offload=str(tmp_path / "disk"),
    )
    assert HELD_IN_FILES in ran.loops[0]["notes"]
    assert ran.fitting["verdict"]["kept"], ran.stderr


def test_what_is_written_is_memory_again(held: HeldInFiles):
    average, shown = [large()], [large()]
    expected = average[0] + 1
    place(held)
    average[0].add_(1)
    array = shown[0].numpy()
    shown[0].add_(1)
    place(held)
    assert not is_mapped(average[0])
    assert torch.equal(average[0], expected)
    # An array sees the mapping: exchanging it would part the two.
    shown[0][0] = 7
    assert array[0] == 7
    place(held)
    assert not is_mapped(average[0])


def test_an_input_in_a_file_takes_nothing_in_the_plan(tmp_path: Path):
    """The whole data in every step: what is predicted is what is measured, without it."""
    ran = inline(
        tmp_path,
        "24MiB",
        """
    import torch
    from torch import nn

    torch.manual_seed(0)
    x, y = torch.rand(4096, 1024), torch.rand(4096, 1)
    model = nn.Sequential(nn.Linear(1024, 128), nn.ReLU(), nn.Linear(128, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(8):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        print(repr(loss.item()))
    """,
        offload="chosen",
    )
    (loop,) = ran.loops
    assert HELD_IN_FILES in loop["notes"]
    assert loop["planned"]["steps"] > 0
    assert ran.stdout


def test_files_in_memory_are_no_files():
    """They would take what they are to save."""
    assert cpu.start() is None
    folder = Path("/dev/shm")  # noqa: S108
    if not folder.is_dir():
        pytest.skip("no folder whose files are in memory")
    held, goes = HeldInFiles(FitRequest("1MiB", Options(offload=str(folder)))), large()
    assert not place(held)
    assert not is_mapped(goes)


def test_with_another_thread_memory_goes_with_the_next_look(
    held: HeldInFiles, monkeypatch: pytest.MonkeyPatch
):
    """It may be in the middle of an op that reads it."""
    monkeypatch.setattr(held_in_files, "is_alone", lambda: False)
    whole = large()
    live = _native.counted_bytes()
    assert place(held)
    assert is_mapped(whole)
    assert _native.counted_bytes() == live
    place(held)
    assert _native.counted_bytes() <= live - whole.nbytes


def test_parameters_that_nothing_trains_go_until_something_does(held: HeldInFiles):
    """A target network, a teacher, the next model: they ask for gradients as all parameters do."""
    trained, target = nn.Linear(256, 256), nn.Linear(256, 256)
    optimizer = torch.optim.SGD(trained.parameters(), 0.1)
    graph = nn.Linear(256, 256)
    held_by_graph = graph(torch.rand(4, 256))
    before = target.weight.detach().clone()
    place(held)
    assert is_mapped(target.weight)
    assert target.weight.requires_grad
    assert not is_mapped(trained.weight)
    assert not is_mapped(graph.weight)
    assert torch.equal(target.weight, before)
    later = torch.optim.SGD(target.parameters(), 0.1)
    held.optimizer_made(later)
    assert not is_mapped(target.weight)
    assert torch.equal(target.weight, before)
    target(torch.rand(4, 256)).sum().backward()
    later.step()
    assert not torch.equal(target.weight, before)
    del held_by_graph, optimizer


def test_what_is_written_through_data_comes_back(held: HeldInFiles):
    """As a target network that follows another: no version tells of that."""
    target = nn.Linear(256, 256)
    place(held)
    assert is_mapped(target.weight)
    target.weight.data.mul_(0.9)
    expected = target.weight.detach().clone()
    place(held)
    assert not is_mapped(target.weight)
    assert torch.equal(target.weight, expected)
    large_one = large()
    place(held, large_one)
    place(held)
    assert not is_mapped(target.weight), "it is written in each step"
    assert torch.equal(target.weight, expected)


def test_what_is_written_seldom_goes_again_and_what_is_written_often_stays(held: HeldInFiles):
    """As a target network that is made like another every so often."""

    def written(each: int, times: int) -> int:
        """Calls of a model for which it is mapped, of so many."""
        mapped = 0
        for call in range(1, times + 1):
            place(held)
            assert torch.equal(target[0], expected)
            mapped += is_mapped(target[0])
            if call % each == 0:
                target[0].add_(1)
                expected.add_(1)
        return mapped

    target, expected = [large()], torch.zeros(0)
    expected = target[0].clone()
    seldom = 3 * CALLS
    assert written(seldom, 10 * seldom) == 10 * seldom, "it had been read for long"
    assert written(2, 40 * CALLS) <= 4 * CALLS
    assert 0 < written(1000, 999) < 999, "it has not been written for long"
    assert written(seldom, 10 * seldom) >= 6 * seldom


def in_rows(held: HeldInFiles, passes: int, *, each_pass_writes: bool = False) -> list[bool]:
    """Whether what is written while a model is asked is mapped in later rows of passes."""
    seen = [large()]
    expected, found = seen[0].clone(), []

    def write() -> None:
        seen[0].view(256, 256)[0].add_(1)
        expected.view(256, 256)[0].add_(1)

    for row in range(5):
        for _ in range(6):
            write()
            held.place(MIB, [], (), is_pass=False)
        rows = seen[0].view(256, 256)
        for _ in range(passes):
            place(held)
            assert torch.equal(seen[0], expected)
            assert rows.data_ptr() == seen[0].data_ptr()
            if row > 1:
                found.append(is_mapped(seen[0]))
            if each_pass_writes:
                write()
    return found


def test_what_is_written_before_passes_and_read_in_them_goes_for_them(held: HeldInFiles):
    """As what an agent has seen: it is written in each rollout, and read in the passes after it."""
    assert all(in_rows(held, passes=6))


def test_what_few_passes_read_or_passes_write_stays(held: HeldInFiles):
    assert not any(in_rows(held, passes=2))
    assert not any(in_rows(held, passes=6, each_pass_writes=True))


def test_what_a_graph_holds_when_it_is_written_comes_back_later(held: HeldInFiles):
    target = nn.Linear(256, 256)
    place(held)
    out = target(torch.rand(4, 256))
    target.weight.data.mul_(0.9)
    expected = target.weight.detach().clone()
    place(held)
    assert is_mapped(target.weight), "the graph has it"
    del out
    place(held)
    assert not is_mapped(target.weight)
    assert torch.equal(target.weight, expected)


def test_what_an_array_sees_of_a_file_comes_back_once_it_is_gone(
    held: HeldInFiles, monkeypatch: pytest.MonkeyPatch
):
    """An input that each batch is copied to: no search looks through all objects in each step."""
    sought: list[int] = []
    found = held_in_files.held_by_python_alone

    def seeking(tensors: list[Tensor]) -> list[Tensor]:
        sought.append(len(tensors))
        return found(tensors)

    batch = [large()]
    array = None
    place(held)
    monkeypatch.setattr(held_in_files, "held_by_python_alone", seeking)
    for step in range(32):
        batch[0].fill_(step)
        array = batch[0].numpy() if array is None else array
        place(held)
        assert array[0] == step
    assert is_mapped(batch[0])
    array = None
    for step in range(32):
        batch[0].fill_(step)
        place(held)
    assert not is_mapped(batch[0])
    assert torch.equal(batch[0], torch.full_like(batch[0], 31))
    assert sought == []


BY_HAND = """
    import torch
    from torch import nn

    torch.manual_seed(0)
    class Descent:
        def __init__(self, parameters):
            self.parameters = list(parameters)
        def step(self):
            for p in self.parameters:
                p.data.add_(p.grad, alpha=-1e-2)
                p.grad = None
    layers = [it for _ in range(6) for it in (nn.Linear(512, 512), nn.GELU())]
    model = nn.Sequential(*layers)
    teacher = nn.Sequential(nn.Linear(512, 8192), nn.Linear(8192, 512))
    optimizer = Descent(model.parameters())
    for step in range(8):
        x = torch.randn(64, 512)
        loss = nn.functional.mse_loss(model(x), teacher(x).detach()) if TEACHES else model(x).mean()
        loss.backward()
        optimizer.step()
        print(repr(loss.item()))
    torch.save(model.state_dict(), "trained.pt")
"""
"""Parameters and gradients take 12 MiB, the teacher 32, and what it returns 2."""


@pytest.mark.parametrize("teaches", [True, False])
def test_parameters_that_an_optimizer_of_the_scripts_own_writes_stay(
    tmp_path: Path, *, teaches: bool
):
    """Pages that are written are memory again, which no allocator counts."""
    code = BY_HAND.replace("TEACHES", str(teaches))
    ran = inline(tmp_path, "40MiB", code, offload=str(tmp_path))
    (loop,) = [loop for loop in ran.loops if loop["planned"]["steps"]]
    least = 2 * 6 * 512 * 512 * 4
    assert loop["planned"]["peak_bytes"] >= least, "what is trained, and its gradients"


SHARED = """
    import torch
    import torch.multiprocessing as mp
    from torch import nn

    def train(model):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            optimizer.zero_grad()
            model(torch.ones(4, 1024)).square().mean().backward()
            optimizer.step()

    if __name__ == "__main__":
        torch.manual_seed(0)
        model = nn.Linear(1024, 1024)
        moment = torch.zeros(4096, 1024)
        del moment
        SHARES
        worker = mp.get_context(START).Process(target=train, args=(model,))
        worker.start()
        worker.join()
        print(worker.exitcode, model.weight.sum().item(), model.bias.sum().item())
"""


@pytest.mark.parametrize(
    ("shares", "start"), [("model.share_memory()", '"fork"'), ("pass", '"spawn"')]
)
def test_what_other_processes_write_to_is_shared_with_them(tmp_path: Path, shares: str, start: str):
    """Hogwild: the model was in a file, as there was no room beside what was made next."""
    (tmp_path / "disk").mkdir()
    code = SHARED.replace("SHARES", shares).replace("START", start)
    ran = inline(tmp_path, "18MiB", code, offload=str(tmp_path / "disk"))
    assert ran.stdout.startswith("0 ")
    assert ran.fitting["verdict"]["peak_bytes"] < 17 * MIB, "it had gone"


@pytest.mark.parametrize("kind", [Tensor, nn.Parameter])
def test_a_queue_sends_what_is_in_a_file(
    held: HeldInFiles, monkeypatch: pytest.MonkeyPatch, kind: type
):
    """Its thread pickles: what it sends is a copy, since the tensor may be in use."""
    sharing = Sharing(held.shares)
    sent = large() if kind is Tensor else nn.Parameter(large())
    expected = sent.detach().clone()
    assert place(held)
    assert is_mapped(sent)
    sharing.install(monkeypatch.setattr)
    try:
        with ThreadPoolExecutor(1) as pool:
            copy = pool.submit(lambda: pickle.loads(ForkingPickler.dumps(sent))).result()  # noqa: S301
        assert is_mapped(sent)
        assert type(copy) is kind
        assert copy.requires_grad == sent.requires_grad
        assert torch.equal(copy, expected)
        assert sent.share_memory_() is sent
        assert not is_private_mapping(sent.untyped_storage())
        assert sent.is_shared()
        assert torch.equal(sent, expected)
    finally:
        sharing.remove()
