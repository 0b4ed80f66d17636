"""Parked models come back at their addresses, bit for bit, or say why not."""

import copy
import gc
import io
import json
import struct

import pytest
import torch
from torch import nn

import memfit
from memfit.errors import DoesNotFit, ParkError, UsageError

MIB = 1 << 20


class Odd(nn.Module):
    """Tied weights, views of one storage, an alias of a buffer, odd types, sizes and strides."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        self.norm = nn.BatchNorm1d(16)
        self.recurrent = nn.LSTM(16, 16)
        self.head = nn.Linear(16, 50, bias=False)
        self.head.weight = self.embedding.weight
        whole = torch.randn(6, 16)
        self.upper = nn.Parameter(whole[:3])
        self.lower = nn.Parameter(whole[2:])
        self.turned = nn.Parameter(torch.randn(16, 5).t())
        self.short = nn.Parameter(torch.randn(7, dtype=torch.bfloat16))
        self.register_buffer("flags", torch.tensor([True, False, True]))
        self.register_buffer("empty", torch.empty(0))
        self.register_buffer("scalar", torch.tensor(3.5), persistent=False)

    def forward(self, tokens):
        hidden = self.norm(self.embedding(tokens)) + self.upper.sum(0) - self.lower.sum(0)
        hidden = hidden + (self.turned.sum() + self.short.sum() + self.scalar) * self.flags[0]
        return self.head(self.recurrent(hidden)[0])


def everything(model):
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def bits(model):
    return {name: tensor.detach().clone() for name, tensor in everything(model).items()}


def addresses(model):
    return {name: tensor.data_ptr() for name, tensor in everything(model).items()}


def same_bits(first, second):
    return first.keys() == second.keys() and all(
        a.dtype == second[name].dtype and torch.equal(a, second[name]) for name, a in first.items()
    )


@pytest.fixture
def spill(tmp_path):
    folder = tmp_path / "parked"
    folder.mkdir()
    return folder


@pytest.fixture
def park(spill, monkeypatch):
    """Parks to a folder that may lie in memory here."""
    from memfit.share.park import parked

    def make(model, **options):
        made = parked.ParkedModel(model, spill, allow_memory=True, **options)
        made.park()
        return made

    return make


def test_everything_comes_back_at_its_address_bit_for_bit(park, spill):
    model = Odd().eval()
    tokens = torch.randint(50, (4,))
    with torch.no_grad():
        output = model(tokens)
    before, objects = bits(model), {name: id(t) for name, t in everything(model).items()}
    parked = park(model)
    parked.wake()
    where = addresses(model)
    for _ in range(2):
        parked.park()
        assert (parked.is_parked, parked.resident_bytes) == (True, 0)
        parked.wake()
        assert (parked.is_parked, parked.resident_bytes) == (False, parked.nbytes)
        assert addresses(model) == where
    assert same_bits(before, bits(model))
    assert objects == {name: id(tensor) for name, tensor in everything(model).items()}
    with torch.no_grad():
        assert torch.equal(model(tokens), output)
    assert list(spill.iterdir()) == []


def test_tied_weights_and_views_stay_one_memory(park):
    model = Odd()
    parked = park(model)
    parked.wake()
    assert model.head.weight is model.embedding.weight
    with torch.no_grad():
        model.upper[2].fill_(7.0)
    assert torch.equal(model.lower[0], torch.full((16,), 7.0))
    assert model.turned.stride() == (1, 5)
    storages = {tensor.untyped_storage().data_ptr() for tensor in everything(model).values()}
    assert len(storages) == len(everything(model)) - 1  # `upper` and `lower`; `empty` is nowhere
    size = model.short.untyped_storage().nbytes()
    assert size == 14, "a saved tensor would take the whole model with it"


def test_every_use_of_a_parked_model_is_an_error_that_names_the_tensor(park):
    model = Odd()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.randint(50, (4,))).sum().backward()
    park(model)
    weight = model.embedding.weight
    uses = [
        lambda: model(torch.randint(50, (4,))),
        lambda: print(weight),
        lambda: weight == weight,  # noqa: PLR0124 - the comparison is what is tested
        weight.numpy,
        weight.tolist,
        lambda: weight[0],
        lambda: weight.data,
        weight.detach,
        model.state_dict,
        lambda: copy.deepcopy(model),
        lambda: torch.save(model, io.BytesIO()),
        lambda: torch.add(torch.ones(50, 16), 1, out=weight),
        model.half,
        optimizer.step,
    ]
    for use in uses:
        with pytest.raises(ParkError, match="was used while its model is parked") as caught:
            use()
        assert caught.value.reason == "parked"
        assert caught.value.tensor in dict(model.named_parameters(remove_duplicate=False))


def test_a_parked_model_still_tells_its_size_and_lets_its_gradients_go(park):
    model = Odd()
    model(torch.randint(50, (4,))).sum().backward()
    count = sum(tensor.numel() for tensor in model.parameters())
    parked = park(model)
    assert sum(tensor.numel() for tensor in model.parameters()) == count
    assert model.embedding.weight.shape == (50, 16)
    assert next(model.parameters()).device.type == "cpu"
    model.zero_grad(set_to_none=True)
    assert model.embedding.weight.grad is None
    assert "Odd" in repr(model)
    parked.wake()
    assert type(model.embedding.weight) is nn.Parameter
    assert type(model.norm.running_mean) is torch.Tensor


def test_training_goes_on_as_if_nothing_had_been(park):
    def trained(model, pause):
        torch.manual_seed(3)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        for _ in range(4):
            loss = model(torch.randint(50, (8,))).square().mean()
            loss.backward()
            optimizer.step()
            del loss
            pause()
            optimizer.zero_grad()
        return bits(model)

    torch.manual_seed(1)
    expected = trained(Odd(), lambda: None)
    torch.manual_seed(1)
    model = Odd()
    parked = park(model)
    parked.wake()

    def pause():
        parked.park()
        parked.wake()

    assert same_bits(trained(model, pause), expected)


def test_only_what_changed_is_written_again_however_it_was_changed(park):
    model = nn.Linear(1024, 2048, bias=False)  # 8 MiB
    parked = park(model)
    first = parked.statistics.bytes_written
    assert first == 8 * MIB
    parked.wake()
    parked.park()
    assert parked.statistics.bytes_written == first
    parked.wake()
    model.weight.data.view(-1)[0] = 1.0  # no version counter sees it
    model.weight.detach().numpy()[1024, 3] = 2.0  # nor this
    parked.park()
    assert parked.statistics.bytes_written == first + 2 * MIB
    parked.wake()
    assert (model.weight[0, 0], model.weight[1024, 3]) == (1.0, 2.0)


def test_memory_is_kept_from_those_who_hold_a_view_of_it(park):
    model = nn.Linear(64, 64)
    parked = park(model)
    parked.wake()
    holders = [
        model.weight.t,
        model.state_dict,
        lambda: model.weight.detach().numpy(),
        lambda: model.weight.expand(2, 64, 64).square(),  # a graph that backward was not run on
    ]
    for hold in holders:
        held = hold()
        with pytest.raises(ParkError, match="a tensor outside the model uses its memory") as caught:
            parked.park()
        assert caught.value.reason == "aliased"
        assert not parked.is_parked
        assert torch.isfinite(model.weight).all()
        del held
    parked.park()


def test_an_alias_from_before_is_refused_and_the_model_stays_as_it_is(spill):
    model = nn.Linear(8, 8)
    alias, address = model.weight.view(-1), model.weight.data_ptr()
    with pytest.raises(ParkError, match="cannot park `weight`: a tensor outside"):
        memfit.park(model, spill)
    assert model.weight.data_ptr() == address
    assert alias.data_ptr() == address


def test_a_tensor_that_was_replaced_meanwhile_is_named(park):
    model = nn.Linear(8, 8)
    parked = park(model)
    parked.wake()
    model.weight = nn.Parameter(torch.ones(8, 8))
    with pytest.raises(ParkError, match="`weight` is not what it was") as caught:
        parked.park()
    assert caught.value.reason == "replaced"
    parked.close()
    again = park(model)
    again.wake()
    assert torch.equal(model.weight, torch.ones(8, 8))


@pytest.mark.parametrize(
    ("tensor", "why"),
    [
        (torch.empty(4, device="meta"), "is on `meta` and has no bytes"),
        (torch.eye(3).to_sparse(), "is torch.sparse_coo of torch.float32"),
        (torch.zeros(4).share_memory_(), "is shared with other processes"),
        (torch.zeros(2, dtype=torch.complex64).conj(), "conjugate or negative view"),
    ],
)
def test_what_cannot_be_parked_is_named_or_left(park, spill, tensor, why):
    model = nn.Linear(4, 4)
    model.register_buffer("odd", tensor)
    with pytest.raises(ParkError, match=f"cannot park `odd`: .*{why}") as caught:
        memfit.park(model, spill)
    assert (caught.value.reason, caught.value.tensor) == ("unsupported", "odd")
    parked = park(model, leave=["odd"])
    assert model.odd.shape == tensor.shape
    parked.wake()
    with pytest.raises(ParkError, match="has no parameter or module buffer `other` to leave"):
        memfit.park(nn.Linear(4, 4), spill, leave=["other"])


def test_models_without_bytes_or_shapes_are_refused(spill):
    with pytest.raises(ParkError, match="no bytes to park"):
        memfit.park(nn.ReLU(), spill)
    with pytest.raises(ParkError, match="cannot park `weight`: it has no shape yet"):
        memfit.park(nn.LazyLinear(4), spill)
    with pytest.raises(UsageError, match=r"`model` must be an `nn\.Module`, got `int`"):
        memfit.park(3, spill)
    with pytest.raises(ParkError, match=r"no folder `.*gone` to write parked models to") as caught:
        memfit.park(nn.Linear(4, 4), spill / "gone")
    assert caught.value.reason == "folder"


def test_a_model_is_parked_by_one_alone(park, spill):
    model = nn.Linear(8, 8)
    parked = park(model)
    assert memfit.park(model, spill) is parked
    parked.wake()
    with pytest.raises(
        ParkError, match=r"belongs to <memfit\.ParkedModel Linear, .*, awake> already"
    ):
        memfit.park(nn.Sequential(model), spill)
    assert memfit.park(model, spill) is parked
    parked.wake()


def test_a_parked_model_can_be_woken_when_its_handle_was_let_go(park, spill):
    model = nn.Linear(8, 8)
    park(model)
    gc.collect()
    memfit.park(model, spill).wake()
    assert torch.isfinite(model.weight).all()


def test_blocks_park_and_wake(park, spill):
    model = nn.Linear(8, 8)
    parked = park(model)
    with parked.awake() as awake:
        assert awake is model
        assert model(torch.ones(8)).shape == (8,)
    assert parked.is_parked
    parked.wake()
    with parked:
        assert parked.is_parked
    assert not parked.is_parked
    parked.close()
    parked.close()
    assert repr(parked) == "<memfit.ParkedModel Linear, 4.0 KiB, closed>"
    with pytest.raises(ParkError, match="it was closed"):
        parked.park()
    assert model(torch.ones(8)).shape == (8,)


class Interrupted:
    """Memory that a signal comes for just when it has been parked or woken."""

    def __init__(self, memory):
        self.memory = memory

    def __getattr__(self, name):
        return getattr(self.memory, name)

    def park(self):
        self.memory.park()
        raise KeyboardInterrupt

    def wake(self):
        self.memory.wake()
        raise KeyboardInterrupt


def test_a_signal_at_the_end_leaves_no_half_parked_model(park):
    model = nn.Linear(8, 8)
    parked = park(model)
    memory, before = parked._memory, bits_of_parked(parked)
    parked._memory = Interrupted(memory)
    with pytest.raises(KeyboardInterrupt):
        parked.wake()
    parked.wake()
    assert same_bits(before, bits(model))
    with pytest.raises(KeyboardInterrupt):
        parked.park()
    assert parked.is_parked
    with pytest.raises(ParkError, match="was used while its model is parked"):
        model(torch.ones(8))
    parked._memory = memory
    parked.wake()
    assert same_bits(before, bits(model))


def bits_of_parked(parked):
    parked.wake()
    found = bits(parked.model)
    parked.park()
    return found


def test_a_model_made_under_inference_mode_can_be_parked(park):
    with torch.inference_mode():
        model = nn.Linear(8, 8)
    before = bits(model)
    parked = park(model)
    parked.wake()
    assert same_bits(before, bits(model))


def test_a_model_parked_under_inference_mode_can_be_trained(park):
    model = nn.Linear(256, 256)
    with torch.inference_mode():
        parked = park(model)
        parked.park()
        parked.wake()
    assert not any(it.is_inference() for it in model.parameters())
    model(torch.rand(4, 256)).sum().backward()
    assert model.weight.grad.abs().sum() > 0


def test_parked_memory_goes_with_its_model(park):
    from pathlib import Path

    def mappings():
        return sum(1 for line in Path("/proc/self/smaps").read_text().splitlines() if "Rss" in line)

    def once():
        model = nn.Linear(512, 512)
        parked = park(model)
        parked.wake()
        parked.park()

    once()
    gc.collect()
    before = mappings()
    files = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(20):
        once()
    gc.collect()
    assert mappings() <= before + 5
    assert len(list(Path("/proc/self/fd").iterdir())) == files


def safetensors(path, tensors):
    """A file of the format, written by hand so that the test needs no library."""
    header, data = {}, b""
    for name, tensor in tensors.items():
        raw = tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()
        offsets = [len(data), len(data) + len(raw)]
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": offsets}
        data += raw
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def test_a_weights_file_is_the_parked_copy_of_what_has_not_changed(park, tmp_path):
    model = nn.Sequential(nn.Linear(512, 1024), nn.Linear(1024, 512))  # 2 MiB each
    file = tmp_path / "model.safetensors"
    safetensors(file, dict(model.named_parameters()))
    before = bits(model)
    parked = park(model, source=file)
    assert parked.statistics.bytes_written == 0
    assert parked.statistics.bytes_in_source == sum(p.nbytes for p in model.parameters())
    parked.wake()
    with torch.no_grad():
        model[1].weight[0, 0] = 5.0
    parked.park()
    assert parked.statistics.bytes_written == MIB
    parked.wake()
    before["1.weight"][0, 0] = 5.0
    assert same_bits(before, bits(model))


def test_a_weights_file_that_was_written_over_is_refused_by_name(park, tmp_path):
    model = nn.Linear(64, 64)
    file = tmp_path / "model.safetensors"
    safetensors(file, dict(model.named_parameters()))
    before, content = bits(model), file.read_bytes()
    parked = park(model, source=file)
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    for _ in range(2):
        with pytest.raises(
            ParkError, match=r"model.safetensors` has changed since .*`bias`"
        ) as caught:
            parked.wake()
        assert caught.value.reason == "changed"
        assert parked.is_parked
    file.write_bytes(content)
    parked.wake()
    assert same_bits(before, bits(model))
    parked.park()
    file.unlink()  # still open, so it is still there
    parked.wake()
    assert same_bits(before, bits(model))


def test_a_file_that_holds_no_weights_is_refused(spill, tmp_path):
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"not weights at all")
    with pytest.raises(ParkError, match="as a parked copy: it is no safetensors file") as caught:
        memfit.park(nn.Linear(4, 4), spill, source=file)
    assert caught.value.reason == "source"


@pytest.mark.offloads_parameters
def test_a_model_whose_parameters_a_plan_keeps_elsewhere_is_refused(park, tmp_path):
    """Looking for their bytes without asking the plan would end the process."""
    model = nn.Sequential(*[nn.Linear(128, 128) for _ in range(12)])
    workload = memfit.Workload(
        model=model,
        batch=torch.randn(8, 128),
        loss=lambda model, batch: model(batch).square().mean(),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
    )
    with memfit.fit(workload, "25%", offload=tmp_path) as fitted:
        assert "offload_parameters" in {action.kind for action in fitted.plan.actions}
        fitted.step()
        with pytest.raises(ParkError, match=r"`0\.weight`.*offloaded") as refused:
            memfit.park(model, tmp_path)
        assert refused.value.reason == "unsupported"
        fitted.step()
    assert park(model).is_parked
    memfit.park(model, tmp_path).wake()
    with pytest.raises(DoesNotFit) as failed:
        memfit.fit(workload, "25%", offload=tmp_path)
    refusals = {refusal.kind: refusal.reason for refusal in failed.value.plan.refusals}
    assert "cannot be let go" in refusals["offload_parameters"]
    memfit.fit(workload, "90%", offload=tmp_path).close()
