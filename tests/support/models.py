"""Real architectures at toy sizes, each with a batch and a loss, for tests of the executor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Built = tuple[nn.Module, dict[str, Tensor], Callable[[nn.Module, dict[str, Tensor]], Tensor]]


def _tokens(vocabulary: int, rows: int = 2, length: int = 16) -> dict[str, Tensor]:
    ids = torch.randint(0, vocabulary, (rows, length))
    return {"input_ids": ids, "labels": ids.clone()}


def _own_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(**batch).loss


def _classify(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch["image"]), batch["label"])


def _images(size: int, rows: int = 2) -> dict[str, Tensor]:
    return {"image": torch.randn(rows, 3, size, size), "label": torch.randint(0, 10, (rows,))}


def gpt2() -> Built:
    """Causal transformer with dropout."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=2, n_head=2, n_embd=32, vocab_size=97, n_positions=32)
    return GPT2LMHeadModel(config), _tokens(97), _own_loss


def bert() -> Built:
    """Encoder with dropout."""
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        vocab_size=97,
    )
    return BertForMaskedLM(config), _tokens(97), _own_loss


def llama() -> Built:
    """Rotary embeddings, grouped queries, gated feed-forward."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=97,
    )
    return LlamaForCausalLM(config), _tokens(97), _own_loss


def t5() -> Built:
    """Encoder and decoder with shared embeddings and dropout."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_heads=4,
        vocab_size=97,
        decoder_start_token_id=0,
    )
    return T5ForConditionalGeneration(config), _tokens(97), _own_loss


def vit() -> Built:
    """Vision transformer with dropout and stochastic depth."""
    import timm

    model = timm.create_model(
        "vit_tiny_patch16_224",
        img_size=32,
        embed_dim=32,
        depth=2,
        num_heads=2,
        num_classes=10,
        drop_rate=0.1,
        drop_path_rate=0.2,
    )
    return model, _images(32), _classify


def convnext() -> Built:
    """Depthwise convolutions and stochastic depth."""
    import timm

    model = timm.create_model(
        "convnext_atto",
        depths=(1, 1, 2, 1),
        dims=(8, 16, 24, 32),
        num_classes=10,
        drop_path_rate=0.5,
    )
    return model, _images(64), _classify


def resnet18() -> Built:
    """Batch normalisation and in-place ReLU."""
    import torchvision

    return torchvision.models.resnet18(num_classes=10), _images(48), _classify


def resnet50() -> Built:
    """Bottlenecks: batch normalisation and in-place ReLU."""
    import torchvision

    return torchvision.models.resnet50(num_classes=10), _images(32), _classify


def unet() -> Built:
    """Group normalisation, skip connections, attention, up- and downsampling."""
    from diffusers import UNet2DModel

    model = UNet2DModel(
        sample_size=16,
        in_channels=3,
        out_channels=3,
        layers_per_block=1,
        block_out_channels=(16, 32),
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        norm_num_groups=8,
        attention_head_dim=8,
    )
    batch = {
        "image": torch.randn(2, 3, 16, 16),
        "noise": torch.randn(2, 3, 16, 16),
        "time": torch.tensor([3, 40]),
    }

    def loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
        return nn.functional.mse_loss(model(batch["image"], batch["time"]).sample, batch["noise"])

    return model, batch, loss


ALL = (gpt2, bert, llama, t5, vit, convnext, resnet18, resnet50, unet)
