"""The twelve models that are measured, each in float32 and under bfloat16 autocast.

Responsible for building a workload with random weights on a device, at full size or at one for
rehearsals, and for naming its blocks. The examples of this repository are used where their
libraries are at hand everywhere; the others are here and in :mod:`benchmarks.gpu.networks`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from benchmarks.gpu import networks
from benchmarks.record import ROOT
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._pytree import tree_map

from memfit import Workload
from memfit.program.target import workload_factory

SEED = 1234

PRECISIONS = ("fp32", "bf16")

Sizes = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Model:
    """One of the models.

    Attributes:
        name: What it is called.
        blocks: Classes of the modules that users put activation checkpointing round; empty where
            it has none.
        full: Settings at full size.
        small: Settings for rehearsals: a step takes a fraction of a second on a CPU.
        build: Makes the workload on the CPU from settings.
    """

    name: str
    blocks: tuple[str, ...]
    full: Sizes
    small: Sizes
    build: Callable[..., Workload]


def example(name: str) -> Callable[..., Workload]:
    """The builder of an example of this repository."""

    def build(**settings: Any) -> Workload:
        pairs = [(key, str(value)) for key, value in settings.items()]
        return workload_factory(f"{ROOT}/examples/{name}.py:build", pairs)()

    return build


def moe(batch: int, sequence: int, layers: int, width: int) -> Workload:
    """Mixtral: each token goes to two of eight experts."""
    import transformers

    config = transformers.MixtralConfig(
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        num_key_value_heads=width // 64,
        num_local_experts=8,
        vocab_size=8192,
        use_cache=False,
        output_router_logits=True,
    )
    return _causal(transformers.MixtralForCausalLM(config), config.vocab_size, batch, sequence)


def whisper(batch: int, frames: int, sequence: int, layers: int, width: int) -> Workload:
    """Whisper: speech to text, encoder and decoder, with dropout."""
    import transformers

    config = transformers.WhisperConfig(
        d_model=width,
        encoder_layers=layers,
        decoder_layers=layers,
        encoder_attention_heads=width // 64,
        decoder_attention_heads=width // 64,
        encoder_ffn_dim=4 * width,
        decoder_ffn_dim=4 * width,
        max_source_positions=frames // 2,
        max_target_positions=max(sequence, 64),
        vocab_size=8192,
        dropout=0.1,
        use_cache=False,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )
    model = transformers.WhisperForConditionalGeneration(config)
    speech = torch.randn(batch, config.num_mel_bins, frames)
    labels = torch.randint(3, config.vocab_size, (batch, sequence))
    return Workload(
        model=model,
        batch={"input_features": speech, "labels": labels},
        loss=lambda model, batch: model(**batch).loss,
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-4),
    )


def lstm(batch: int, sequence: int, layers: int, width: int) -> Workload:
    """A language model with an LSTM."""
    vocabulary = 8192
    ids = torch.randint(0, vocabulary, (batch, sequence + 1))
    return Workload(
        model=networks.LanguageLSTM(vocabulary, width, layers, dropout=0.1),
        batch={"ids": ids[:, :-1].contiguous(), "next": ids[:, 1:].contiguous()},
        loss=lambda model, batch: functional.cross_entropy(
            model(batch["ids"]).flatten(0, 1), batch["next"].flatten()
        ),
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3),
    )


def unet(batch: int, resolution: int, width: int, levels: int) -> Workload:
    """A U-Net for segmentation."""
    classes = 21
    return Workload(
        model=networks.UNet(width, levels, classes),
        batch={
            "images": torch.randn(batch, 3, resolution, resolution),
            "classes": torch.randint(0, classes, (batch, resolution, resolution)),
        },
        loss=lambda model, batch: functional.cross_entropy(
            model(batch["images"]), batch["classes"]
        ),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    )


def diffusion(batch: int, resolution: int, width: int) -> Workload:
    """The UNet of a diffusion model."""
    shape = (batch, 3, resolution, resolution)
    return Workload(
        model=networks.DiffusionUNet(width, (1, 2, 2, 2), dropout=0.1),
        batch={
            "images": torch.randn(shape),
            "times": torch.randint(0, 1000, (batch,)),
            "noise": torch.randn(shape),
        },
        loss=lambda model, batch: functional.mse_loss(
            model(batch["images"], batch["times"]), batch["noise"]
        ),
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-4),
    )


def _causal(model: nn.Module, vocabulary: int, batch: int, sequence: int) -> Workload:
    ids = torch.randint(0, vocabulary, (batch, sequence))
    return Workload(
        model=model,
        batch={"input_ids": ids, "labels": ids},
        loss=lambda model, batch: model(**batch).loss,
        optimizer=lambda params: torch.optim.AdamW(params, lr=3e-4),
    )


_TINY_TEXT: Sizes = {"batch": 2, "sequence": 64, "layers": 2, "width": 128}

MODELS = {
    model.name: model
    for model in (
        Model("gpt2", ("GPT2Block",), {"batch": 8, "sequence": 1024}, _TINY_TEXT, example("gpt2")),
        Model(
            "llama",
            ("LlamaDecoderLayer",),
            {"batch": 8, "sequence": 1024, "layers": 16, "width": 1024},
            _TINY_TEXT,
            example("llama"),
        ),
        Model(
            "bert",
            ("BertLayer",),
            {"batch": 32, "sequence": 512, "layers": 12, "width": 768},
            _TINY_TEXT,
            example("bert"),
        ),
        Model("t5", ("T5Block",), {"batch": 16, "sequence": 512}, _TINY_TEXT, example("t5")),
        Model(
            "resnet50",
            ("Bottleneck", "BasicBlock"),
            {"batch": 64},
            {"batch": 2, "layers": 18, "resolution": 64},
            example("resnet50"),
        ),
        Model(
            "vit",
            ("Block",),
            {"batch": 64, "name": "vit_base_patch16_224"},
            {"batch": 2, "name": "vit_tiny_patch16_224", "depth": 3},
            example("vit"),
        ),
        Model(
            "convnext",
            ("ConvNeXtBlock",),
            {"batch": 64},
            {"batch": 2, "name": "convnext_atto", "resolution": 64},
            example("convnext"),
        ),
        Model(
            "unet",
            ("TwoConvolutions",),
            {"batch": 8, "resolution": 256, "width": 64, "levels": 5},
            {"batch": 2, "resolution": 32, "width": 8, "levels": 3},
            unet,
        ),
        Model(
            "lstm",
            (),
            {"batch": 64, "sequence": 256, "layers": 2, "width": 1024},
            {"batch": 4, "sequence": 16, "layers": 2, "width": 64},
            lstm,
        ),
        Model(
            "moe",
            ("MixtralDecoderLayer",),
            {"batch": 8, "sequence": 512, "layers": 6, "width": 768},
            _TINY_TEXT,
            moe,
        ),
        Model(
            "whisper",
            ("WhisperEncoderLayer", "WhisperDecoderLayer"),
            {"batch": 8, "frames": 3000, "sequence": 224, "layers": 6, "width": 512},
            {"batch": 2, "frames": 64, "sequence": 16, "layers": 2, "width": 128},
            whisper,
        ),
        Model(
            "diffusion",
            ("ResidualBlock", "SelfAttention"),
            {"batch": 16, "resolution": 64, "width": 192},
            {"batch": 2, "resolution": 16, "width": 32},
            diffusion,
        ),
    )
}


@dataclass(frozen=True, slots=True)
class Case:
    """A model at a precision.

    Attributes:
        model: Its name.
        precision: ``fp32``, or ``bf16`` for bfloat16 autocast.
        is_small: Whether at the size for rehearsals.
    """

    model: str
    precision: str
    is_small: bool

    @property
    def name(self) -> str:
        """What its row is called."""
        return f"{self.model} {self.precision}"

    @property
    def sizes(self) -> Sizes:
        """Its settings."""
        model = MODELS[self.model]
        return model.small if self.is_small else model.full


def cases(names: list[str], *, small: bool, precisions: tuple[str, ...] = PRECISIONS) -> list[Case]:
    """The cases of some models, or of all: first all of one precision, then of the next."""
    chosen = [name for name in MODELS if not names or name in names]
    return [Case(name, precision, small) for precision in precisions for name in chosen]


def build(case: Case, place: torch.device) -> Workload:
    """The workload of a case on a device; its weights are the same in every process.

    Args:
        case: The case.
        place: The device.
    """
    torch.manual_seed(SEED)
    workload = MODELS[case.model].build(**case.sizes)
    config = getattr(workload.model, "config", None)
    if config is not None and hasattr(config, "use_cache"):
        # What one sets for training: a cache of keys and values would grow again in recomputation.
        config.use_cache = False

    def move(leaf: Any) -> Any:
        return leaf.to(place) if isinstance(leaf, Tensor) else leaf

    return replace(
        workload,
        model=workload.model.to(place),
        batch=tree_map(move, workload.batch),
        autocast=torch.bfloat16 if case.precision == "bf16" else None,
    )


def blocks(case: Case, model: nn.Module) -> list[nn.Module]:
    """The model's blocks, in the order in which it registers them."""
    return [m for m in model.modules() if type(m).__name__ in MODELS[case.model].blocks]
