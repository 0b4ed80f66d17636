"""A call larger than its model's example: foreseen before it runs, given room, or refused."""

import copy
import io
import re
import threading

import pytest
import torch
from torch import nn

import memfit
from memfit.errors import PoolError, UsageError
from memfit.share.pool.activations import inputs_of
from memfit.share.pool.law import CallLaw, Unforeseen
from memfit.share.pool.measured import UseMeter, tolerated

MIB = 1 << 20


def tokens(rows, length):
    return {"input_ids": torch.randint(0, 256, (rows, length))}


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=256, **sizes, **heads))


def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 1024, "vocab_size": 256}
    tokens_of_its_own = {"bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(**sizes, **tokens_of_its_own, attn_implementation="eager"))


def vit():
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    return ViTForImageClassification(
        ViTConfig(**sizes, num_attention_heads=4, image_size=32, patch_size=8)
    )


def images(rows, side):
    return torch.randn(rows, 3, side, side)


@pytest.mark.parametrize(
    ("build", "inputs", "example", "calls"),
    [
        (llama, tokens, (2, 64), [(2, 512), (16, 64), (5, 77), (1, 700)]),
        (gpt2, tokens, (1, 64), [(1, 512), (16, 64), (5, 77), (3, 300)]),
        (vit, images, (2, 32), [(3, 32), (64, 32)]),
    ],
)
def test_the_law_is_the_truth(build, inputs, example, calls):
    torch.manual_seed(0)
    model = build().eval()
    law = CallLaw(model, inputs(*example), "host")
    meter = UseMeter("host")
    for sizes in calls:
        there = inputs(*sizes)
        args, kwargs = inputs_of(there)
        own = sum(tensor.nbytes for tensor in (*args, *kwargs.values()))
        predicted, upper = law.bytes_at(law.sizes_of(model, (args, kwargs)))
        with torch.no_grad():
            model(*args, **kwargs)  # what it keeps from its first call on is not the call's
            meter.begin()
            out = model(*args, **kwargs)
            took = meter.end()
        assert predicted - own == pytest.approx(took, rel=1e-3), sizes
        assert upper >= predicted
        del out


class Attention(nn.Module):
    """Takes memory by the square of the length."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(1024, 1024, bias=False)

    def forward(self, x, scale=1.0):
        return (x @ x.transpose(1, 2) * scale).softmax(-1) @ self.linear(x)


class Sparing(Attention):
    """Goes over long inputs by halves."""

    def forward(self, x):
        if x.shape[1] < 1500:
            return super().forward(x).sum()
        return sum(super(Sparing, self).forward(part).sum() for part in x.chunk(4, 1))


def words(length, rows=1):
    return torch.ones(rows, length, 1024)


@pytest.fixture
def make(tmp_path):
    """Pools of a model that was told of 64 words, and an ordinary one, both of 4 MiB."""

    def pool(budget, model=None, **options):
        made = memfit.Pool(budget, tmp_path / "parked", allow_memory=True, **options)
        made.add("attention", model or Attention(), example=words(64))
        made.add("other", nn.Linear(1024, 1024, bias=False), activation_bytes="1MiB")
        return made

    return pool


def test_a_longer_call_has_others_parked_before_it_runs(make):
    pool = make("24MiB")
    called = []
    with pool.use("attention") as model, torch.no_grad():
        model(words(64))
        assert pool.awake == ["attention", "other"]
        model.linear.register_forward_hook(lambda *_: called.append(pool.awake))
        model(words(1024))
        # The input, what the linear layer makes, the scores and their softmax, 4 MiB each.
        assert 20 * MIB <= pool.counted_bytes <= 24 * MIB
        model(words(1025))
    assert called == [["attention"]] * 2
    took = pool.activations("attention").measured_bytes
    assert 12 * MIB <= took <= 17 * MIB
    assert pool.statistics.uses == 1
    assert pool.counted_bytes == 4 * MIB
    with pool.use("other"), pool.use("attention") as model, torch.no_grad():
        model(words(64))  # shorter ones count with as little as before
    assert len(pool.awake) == 2


def test_a_call_that_cannot_fit_is_refused_before_anything_is_allocated(make):
    pool = make("24MiB")
    long = words(2048)
    with pool.use("attention") as model, torch.no_grad():
        meter = UseMeter("host")
        meter.begin()
        with pytest.raises(PoolError) as caught:
            model(x=long)
        assert meter.end() < MIB
        model(words(64))
    wanted = caught.value.wanted_bytes
    assert caught.value.reason == "too_large"
    assert 44 * MIB <= wanted < 45 * MIB
    assert caught.value.available_bytes == 24 * MIB
    said = str(caught.value)
    assert "`attention` called with `x` of [1, 2048, 1024] takes" in said
    assert f"({wanted} bytes) with it" in said
    assert "the pool's 24.0 MiB; nothing was allocated" in said
    assert pool.activations("attention").measured_bytes < 4 * MIB


def test_a_call_waits_for_room_as_its_use_does(make):
    pool = make("24MiB")
    inside, leave = threading.Event(), threading.Event()

    def hold():
        with pool.use("other"):
            inside.set()
            leave.wait(30)

    thread = threading.Thread(target=hold)
    thread.start()
    inside.wait(30)
    with pool.use("attention", wait=0.05) as model, torch.no_grad():
        with pytest.raises(PoolError) as caught:
            model(words(1100))
        assert caught.value.reason == "timed_out"
    threading.Timer(0.1, leave.set).start()
    with pool.use("attention", wait=30) as model, torch.no_grad():
        model(words(1100))
    thread.join(30)
    assert pool.awake == ["attention"]


def test_nothing_is_refused_that_takes_less_than_the_law_says(make):
    pool = make("24MiB", Sparing())
    x = words(2048)
    with pool.use("attention") as model, torch.no_grad():
        model(x)
    assert pool.activations("attention").measured_bytes < 16 * MIB


def test_a_call_that_the_law_is_not_of_is_measured_and_the_warning_says_why(make):
    pool = make("20MiB")
    match = "it was not foreseen, as it was called with other arguments than the example"
    with (
        pytest.warns(memfit.PoolWarning, match=match),
        pool.use("attention") as model,
        torch.no_grad(),
    ):
        model(words(1024), scale=0.5)
    assert pool.activations("attention").unforeseen == ""
    assert pool.activations("other").unforeseen == "it was added without an example"


def test_a_guard_holds_what_was_not_foreseen(make):
    pool = make("24MiB", guard=True)
    x = words(1024)
    counted = tolerated(pool.activations("attention").declared_bytes)
    meter = UseMeter("host")
    for _ in range(2):
        meter.begin()
        with (
            pytest.raises(memfit.OutOfBudget),
            pool.use("attention") as model,
            torch.no_grad(),
        ):
            model(x, scale=0.5)
        assert meter.end() <= counted
        with pool.use("attention") as model, torch.no_grad():
            model(x)  # has room made, and runs in it
    assert pool.counted_bytes == 4 * MIB
    torch.ones(8 << 20)  # outside uses nothing is held
    with pytest.raises(UsageError, match="needs `example` or `activation_bytes`"):
        pool.add("unsaid", nn.Linear(2, 2))


def test_guarded_uses_in_threads_do_not_take_each_others_room(make):
    pool = make("64MiB", guard=True)
    failures = []

    def call(x):
        try:
            for _ in range(5):
                with pool.use("attention") as model, torch.no_grad():
                    model(x)
        except memfit.MemfitError as error:
            failures.append(error)

    inputs = [words(length) for length in (64, 512, 1024)]
    threads = [threading.Thread(target=call, args=(x,)) for x in inputs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures
    assert pool.statistics.peak_bytes <= 64 * MIB


def test_sizes_that_cannot_vary_and_other_forms_are_unforeseen():
    model = Attention()
    law = CallLaw(model, words(64), "host")

    def sizes(*args, **kwargs):
        return law.sizes_of(model, (args, kwargs))

    assert sizes(words(80, rows=3)).wanted == [3, 80]
    assert sizes(x=words(80)).wanted == [1, 80]
    assert sizes(words(80), 1.0).wanted == [1, 80]
    for args in [
        (torch.ones(1, 64, 512),),
        (words(64).double(),),
        (words(64)[0],),
        (words(64), 2.0),
        ([words(64)],),
        (),
    ]:
        with pytest.raises(Unforeseen):
            sizes(*args)
    with pytest.raises(Unforeseen, match="autocast"), torch.autocast("cpu"):
        sizes(words(64))
    model.train(not model.training)
    with pytest.raises(Unforeseen, match="training"):
        sizes(words(64))


def test_copies_of_the_model_and_models_taken_out_are_not_watched(make):
    pool = make("20MiB")
    long = words(2048)
    with pool.use("attention") as model:
        pass
    copied = copy.deepcopy(model)
    torch.save(model, io.BytesIO())
    with pool.use("attention"):
        pass
    assert copied(long).shape == long.shape
    with pool.use("attention") as model, torch.no_grad(), pytest.raises(PoolError):
        model(long)
    model = pool.remove("attention").model
    assert not model._forward_pre_hooks
    assert re.search("1 of 1 models awake", repr(pool))


def test_a_model_of_two_pools_one_after_the_other(make):
    pool = make("64MiB")
    parked = pool.remove("attention")
    parked.close()
    pool.add("again", parked.model, example=words(64))
    with pool.use("again") as model, torch.no_grad():
        model(words(1024))
    assert pool.activations("again").unforeseen == ""
