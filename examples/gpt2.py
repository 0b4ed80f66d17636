"""GPT-2 small, training with dropout: the first example of the README.

Run it with `memfit verify examples/gpt2.py:build --budget 50%`.
"""

import torch
import transformers

import memfit


def build(
    batch: int = 4,
    sequence: int = 512,
    layers: int = 12,
    width: int = 768,
    dropout: float = 0.1,
) -> memfit.Workload:
    """GPT-2 with random weights.

    Args:
        batch: Number of sequences.
        sequence: Tokens per sequence.
        layers: Number of transformer blocks.
        width: Size of the hidden state; 64 per attention head.
        dropout: Probability everywhere GPT-2 has dropout.
    """
    config = transformers.GPT2Config(
        n_layer=layers,
        n_embd=width,
        n_head=max(width // 64, 1),
        n_positions=max(sequence, 1024),
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
    )
    model = transformers.GPT2LMHeadModel(config)
    ids = torch.randint(0, config.vocab_size, (batch, sequence))
    return memfit.Workload(
        model=model,
        batch={"input_ids": ids, "labels": ids},
        loss=lambda model, batch: model(**batch).loss,
        optimizer=lambda params: torch.optim.AdamW(params, lr=3e-4),
    )
