"""A model that is used while it is still read: every tensor is there, whole, before it is used."""

import contextlib
import copy
import gc
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import nn

import memfit
from memfit.errors import ParkError
from memfit.share.park.parked import ParkedModel

MIB = 1 << 20
LAYER = 4 * MIB


def layers(count=3):
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(count)])


@pytest.fixture
def stream(tmp_path):
    """Parks a model in a folder that may lie in memory here, and wakes it while it is read.

    As if its file had been changed, or had left memory: otherwise there is nothing to read.
    """

    def make(model, **options):
        parked = model
        if not isinstance(model, ParkedModel):
            parked = ParkedModel(model, tmp_path, allow_memory=True, **options)
        parked.park()
        for file in nameless_files(tmp_path):
            os.utime(file)
        parked.wake(stream=True)
        return parked

    return make


def is_behind_barrier(tensor):
    return type(tensor) is not nn.Parameter


def read_bytes(parked):
    return parked.statistics.bytes_read


def nameless_files(folder):
    """What something is parked in, to be damaged."""
    found = []
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed by another thread meanwhile
            if link.readlink().is_relative_to(folder.resolve()):
                found.append(link)
    return found


def flip(file, place):
    """Changes one bit of a file, or puts it back."""
    with file.open("r+b") as opened:
        opened.seek(place)
        byte = opened.read(1)
        opened.seek(place)
        opened.write(bytes([byte[0] ^ 1]))


def test_layers_come_as_they_are_used_and_give_the_same_bits(stream):
    model = layers()
    batch = torch.ones(2, 1024)
    expected = [weight.detach().clone() for weight in model.parameters()]
    with torch.no_grad():
        outputs = [model[0](batch), model(batch)]
    parked = stream(model)
    assert (parked.is_parked, parked.resident_bytes) == (False, 3 * LAYER)
    assert read_bytes(parked) == 0
    where = [weight.data_ptr() for weight in model.parameters()]
    stream(parked)
    before = read_bytes(parked)
    with torch.no_grad():
        assert torch.equal(model[0](batch), outputs[0])
        assert read_bytes(parked) - before == LAYER
        parked.wake(stream=True)  # it comes already
        assert read_bytes(parked) - before == LAYER
        assert [is_behind_barrier(weight) for weight in model.parameters()] == [False, True, True]
        assert torch.equal(model(batch), outputs[1])
    assert read_bytes(parked) - before == 3 * LAYER
    assert not any(map(is_behind_barrier, model.parameters()))
    assert [weight.data_ptr() for weight in model.parameters()] == where
    assert all(map(torch.equal, model.parameters(), expected))


def test_a_model_that_was_used_in_part_is_parked_again_without_a_write(stream):
    model = layers()
    expected = [weight.detach().clone() for weight in model.parameters()]
    parked = stream(model)
    for number in range(3):
        model[number](torch.ones(1024))
        parked.park()
        with pytest.raises(ParkError, match="was used while its model is parked"):
            model[number](torch.ones(1024))
        stream(parked)
    assert parked.statistics.bytes_written == 3 * LAYER
    parked.wake()
    assert not any(map(is_behind_barrier, model.parameters()))
    assert all(map(torch.equal, model.parameters(), expected))


def test_training_goes_on_while_the_model_comes(stream):
    model, twin = layers(), layers()
    for step in range(3):
        batch = torch.full((2, 1024), float(step))
        optimizers = [torch.optim.Adam(each.parameters()) for each in (model, twin)]
        parked = stream(model)
        for each, optimizer in zip((model, twin), optimizers, strict=True):
            each(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert all(map(torch.equal, model.parameters(), twin.parameters()))
        parked.close()


@pytest.mark.parametrize(
    "look",
    [
        lambda model: copy.deepcopy(model).state_dict(),
        lambda model: dict(model.state_dict()),
        lambda model: {name: weight.data for name, weight in model.named_parameters()},
        lambda model: {name: torch.from_numpy(w.detach().numpy()) for name, w in named(model)},
        lambda model: {name: torch.tensor(weight.tolist()) for name, weight in named(model)},
    ],
)
def test_every_way_to_look_at_a_tensor_waits_for_it(stream, look):
    model = layers(1)
    expected = model[0].weight.detach().clone()
    stream(model)
    assert is_behind_barrier(model[0].weight)
    assert torch.equal(look(model)["0.weight"], expected)


def named(model):
    return model.named_parameters()


def test_damage_is_an_error_of_the_use_and_of_no_other(stream, tmp_path):
    model = layers()
    batch = torch.ones(2, 1024)
    expected = [layer(batch) for layer in model]
    parked = stream(model)
    parked.park()
    [file] = nameless_files(tmp_path)
    flip(file, LAYER + 100)
    for _ in range(2):
        stream(parked)
        assert torch.equal(model[0](batch), expected[0])
        for _ in range(2):
            with pytest.raises(ParkError, match="came back changed") as caught:
                model[1](batch)
            assert caught.value.reason == "changed"
        assert torch.equal(model[2](batch), expected[2])
        with pytest.raises(ParkError, match="came back changed"):
            parked.wake()
        with pytest.raises(ParkError, match="came back changed"):
            parked.close()
        parked.park()
    flip(file, LAYER + 100)
    parked.wake(stream=True)
    parked.close()
    assert torch.equal(model[1](batch), expected[1])


class Attends(nn.Module):
    """Attention between two linear layers."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(512, 512)
        self.attention = nn.MultiheadAttention(512, 4, batch_first=True)
        self.block = nn.TransformerEncoderLayer(512, 4, 512, batch_first=True)
        self.last = nn.Linear(512, 512)

    def forward(self, batch):
        hidden = self.first(batch)
        hidden = self.attention(hidden, hidden, hidden, need_weights=False)[0]
        return self.last(self.block(hidden))


def test_attention_that_has_a_fast_path_takes_it(stream):
    torch.manual_seed(0)
    model = Attends().eval()
    batch = torch.randn(3, 5, 512)
    with torch.inference_mode():
        expected = model(batch)
    stream(model)
    assert is_behind_barrier(model.first.weight)
    assert not is_behind_barrier(model.block.linear1.weight)
    assert not is_behind_barrier(model.attention.in_proj_weight)
    with torch.inference_mode(), torch.profiler.profile(acc_events=True) as profile:
        assert torch.equal(model(batch), expected)
    calls = {event.name for event in profile.events()}
    assert "aten::_transformer_encoder_layer_fwd" in calls
    assert "aten::_native_multi_head_attention" in calls


def test_damage_of_what_is_needed_at_once_leaves_the_model_parked(stream, tmp_path):
    model = nn.Sequential(*layers(1), nn.TransformerEncoderLayer(512, 4, 512)).eval()
    expected = [weight.detach().clone() for weight in model.parameters()]
    parked = stream(model)
    parked.park()
    [file] = nameless_files(tmp_path)
    flip(file, LAYER + 100)
    for _ in range(2):
        with pytest.raises(ParkError, match="came back changed"):
            parked.wake(stream=True)
        assert parked.is_parked
        with pytest.raises(ParkError, match="was used while its model is parked"):
            model[0](torch.ones(1024))
    flip(file, LAYER + 100)
    parked.wake(stream=True)
    assert all(map(torch.equal, model.parameters(), expected))


@pytest.mark.parametrize("how", ["wrapped", "method", "forward"])
def test_what_is_compiled_is_not_compiled_again(stream, how):
    from torch._dynamo.testing import CompileCounter

    model = nn.Sequential(*layers(1), layers(2))
    counter = CompileCounter()
    if how == "wrapped":
        model[1] = torch.compile(model[1], backend=counter)
    elif how == "method":
        model[1].compile(backend=counter)
    else:
        model[1].forward = torch.compile(model[1].forward, backend=counter)
    with torch.no_grad():
        expected = model(torch.ones(2, 1024))
        if how == "method" and counter.frame_count == 0:
            pytest.skip("this torch compiles nothing of a module's `compile` here, parked or not")
        assert counter.frame_count == 1
        parked = stream(model)
        for _ in range(2):
            barred = [is_behind_barrier(weight) for weight in model.parameters()]
            assert barred == [True, False, False]
            assert torch.equal(model(torch.ones(2, 1024)), expected)
            stream(parked)
    assert counter.frame_count == 1


def test_threads_that_use_it_at_once_see_the_same_bits(stream):
    model = layers(8).requires_grad_(requires_grad=False)
    batch = torch.ones(2, 1024)
    expected = model(batch)
    parked = stream(model)
    for _ in range(5):
        with ThreadPoolExecutor(4) as threads:
            outputs = list(threads.map(model, [batch] * 4))
        assert all(torch.equal(output, expected) for output in outputs)
        stream(parked)


def test_a_model_in_a_weights_file_is_there_at_once(stream, tmp_path):
    model = layers(1)
    content = model[0].weight.detach().numpy().tobytes()
    header = b'{"0.weight":{"dtype":"F32","shape":[1024,1024],"data_offsets":[0,4194304]}}'
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(len(header).to_bytes(8, "little") + header + content)
    parked = stream(model, source=weights)
    assert read_bytes(parked) == LAYER
    assert not is_behind_barrier(model[0].weight)
    assert model[0].weight.detach().numpy().tobytes() == content


def test_a_model_whose_handle_was_let_go_still_comes(stream):
    model = layers(2)
    batch = torch.ones(2, 1024)
    expected = model(batch).detach()
    stream(model)
    gc.collect()
    assert torch.equal(model(batch), expected)


def test_a_pool_serves_from_models_that_still_come(tmp_path):
    folder = tmp_path / "parked"
    pool = memfit.Pool("9MiB", folder, stream=True, allow_memory=True)
    batch = torch.ones(2, 1024)
    expected, came = {}, 0
    for name in "abcd":
        model = layers(1)
        with torch.no_grad():
            model[0].weight.add_(ord(name))
        expected[name] = model(batch).detach()
        pool.add(name, model)
    for name in "abcdabcdaabbccdd":
        for file in nameless_files(folder):
            os.utime(file)
        with pool.use(name) as model:
            came += is_behind_barrier(model[0].weight)
            assert torch.equal(model(batch), expected[name])
        assert pool.counted_bytes <= 9 * MIB
    statistics = pool.statistics
    assert statistics.hits + statistics.wakes == 16
    assert came == statistics.wakes > 4
