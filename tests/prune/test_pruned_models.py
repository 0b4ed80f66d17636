"""Pruned models of the zoo compute what the whole ones do with the pruned channels at zero."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
import torchvision
import transformers
from masked import masked
from torch import Tensor, nn
from torch.nn import functional

import memfit
from memfit.prune.trial import separable


class UNet(nn.Module):
    """Down, up, a skip that is concatenated, norms over groups."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 16, 3, padding=1)
        self.norm = nn.GroupNorm(4, 16)
        self.down = nn.Conv2d(16, 24, 3, stride=2, padding=1)
        self.up = nn.ConvTranspose2d(24, 12, 2, stride=2)
        self.join = nn.Conv2d(28, 8, 3, padding=1)
        self.last = nn.Conv2d(8, 2, 1)

    def forward(self, images: Tensor) -> Tensor:
        wide = torch.relu(self.norm(self.first(images)))
        deep = functional.silu(self.up(torch.relu(self.down(wide))))
        joined: Tensor = self.last(torch.relu(self.join(torch.cat([deep, wide], 1))))
        return joined


def images(model: nn.Module, size: int = 32) -> memfit.Workload:
    def loss(model: Any, batch: Any) -> Tensor:
        return model(batch).square().mean()

    return memfit.Workload(model, torch.randn(2, 3, size, size), loss)


def tokens(model: nn.Module) -> memfit.Workload:
    def loss(model: Any, batch: Any) -> Tensor:
        out: Tensor = model(**batch).loss
        return out

    ids = torch.randint(0, 64, (2, 12))
    return memfit.Workload(model, {"input_ids": ids, "labels": ids}, loss)


def gpt2() -> memfit.Workload:
    config = transformers.GPT2Config(
        vocab_size=64, n_positions=16, n_embd=48, n_layer=2, n_head=6, use_cache=False
    )
    return tokens(transformers.GPT2LMHeadModel(config))


def llama(attention: str = "sdpa") -> memfit.Workload:
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=6,
        use_cache=False,
        attn_implementation=attention,
    )
    return tokens(transformers.LlamaForCausalLM(config))


def t5() -> memfit.Workload:
    config = transformers.T5Config(
        vocab_size=64,
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_heads=6,
        use_cache=False,
        decoder_start_token_id=0,
    )
    return tokens(transformers.T5ForConditionalGeneration(config))


def bert() -> memfit.Workload:
    config = transformers.BertConfig(
        vocab_size=64,
        hidden_size=48,
        num_hidden_layers=2,
        num_attention_heads=6,
        intermediate_size=96,
    )
    return tokens(transformers.BertForMaskedLM(config))


def vit(**options: Any) -> memfit.Workload:
    made = timm.create_model(
        "vit_tiny_patch16_224", img_size=32, depth=2, embed_dim=48, num_heads=6, **options
    )
    return images(made)


def densenet() -> memfit.Workload:
    made = torchvision.models.DenseNet(growth_rate=8, block_config=(2, 3), num_init_features=16)
    return images(made)


def resnext() -> memfit.Workload:
    layers = [1, 1, 1, 1]
    block = torchvision.models.resnet.Bottleneck
    made = torchvision.models.ResNet(block, layers, groups=8, width_per_group=4)
    return images(made)


class Encoder(nn.Module):
    """Layers of torch, whose attention says its sizes in code, and whose line is the caller's."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2)
        self.last = nn.Linear(32, 3)

    def forward(self, rows: Tensor) -> Tensor:
        out: Tensor = self.last(self.layers(rows).mean(1))
        return out


def encoder() -> memfit.Workload:
    def loss(model: Any, batch: Any) -> Tensor:
        return model(batch).square().mean()

    return memfit.Workload(Encoder(), torch.randn(2, 5, 32), loss)


MODELS: dict[str, tuple[Callable[[], memfit.Workload], int]] = {
    "resnet18": (lambda: images(torchvision.models.resnet18()), 12),
    "mobilenet": (lambda: images(torchvision.models.mobilenet_v2(width_mult=0.25)), 24),
    "vgg": (lambda: images(torchvision.models.vgg11_bn(num_classes=10)), 10),
    "densenet": (densenet, 12),
    "resnext": (resnext, 9),
    "unet": (lambda: images(UNet()), 4),
    "convnext": (lambda: images(timm.create_model("convnext_atto", depths=(1, 1, 1, 1))), 4),
    "vit": (vit, 4),
    "gpt2": (gpt2, 4),
    "llama": (llama, 4),
    "llama_eager": (lambda: llama("eager"), 4),
    "bert": (bert, 4),
    "t5": (t5, 6),
    "encoder": (encoder, 2),
}
"""Models, and how many groups each has."""


@pytest.mark.parametrize("name", MODELS)
def test_the_pruned_model_is_the_masked_one(name: str) -> None:
    torch.manual_seed(0)
    build, groups = MODELS[name]
    workload = build()
    found = separable(workload, through_norms=False)
    choose = random.Random(1)
    removed = tuple(
        tuple(sorted(choose.sample(range(group.channels), group.channels // 2)))
        for group in found.groups
    )
    pruned = found.without(removed, weights=True)
    found.require_as_meant(removed, pruned)
    whole = masked(workload.model, found.groups, removed).eval()
    assert workload.loss is not None
    with torch.no_grad():
        expected = outputs(whole, workload.batch)
        found_outputs = outputs(pruned.model.eval(), workload.batch)
    assert (found_outputs - expected).abs().max() <= 1e-5 * max(1.0, expected.abs().max().item())
    assert len(found.groups) == groups
    with torch.no_grad():  # what went was there before
        assert not torch.equal(outputs(workload.model.eval(), workload.batch), expected)
    workload.model.train()
    loss = workload.loss(pruned.model.train(), pruned.batch)
    loss.backward()  # type: ignore[no-untyped-call]
    assert torch.isfinite(loss)


LEFT = {
    "resnet18": (lambda: images(torchvision.models.resnet18(num_classes=100)), 2_824_580),
    "mobilenet": (lambda: images(torchvision.models.mobilenet_v2()), 1_221_768),
    "convnext": (lambda: images(timm.create_model("convnext_atto")), 1_032_260),
    "vit": (lambda: images(timm.create_model("vit_tiny_patch16_224", num_heads=6), 224), 1_532_104),
}
"""Models, and the parameters that torch-pruning 1.6.1 leaves with half of their channels."""


@pytest.mark.parametrize("name", LEFT)
def test_as_many_parameters_are_left_as_by_depgraph(name: str) -> None:
    build, left = LEFT[name]
    found = separable(build(), through_norms=True)
    removed = tuple(tuple(range(group.channels // 2)) for group in found.groups)
    pruned = found.without(removed, weights=True)
    found.require_as_meant(removed, pruned)
    assert sum(parameter.numel() for parameter in pruned.model.parameters()) == left


def test_the_width_goes_where_norms_may_take_their_mean_anew() -> None:
    found = separable(llama(), through_norms=True)
    names = {member.name for group in found.groups for member in group.members}
    assert {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"} <= names


def outputs(model: nn.Module, batch: Any) -> Tensor:
    out: Tensor = model(**batch).logits if isinstance(batch, dict) else model(batch)
    return out
