"""BERT learning to fill in masked words, with dropout and padding.

Run it with `memfit verify examples/bert.py:build --budget 50%`.
"""

import torch
import transformers

import memfit


def build(
    batch: int = 16,
    sequence: int = 128,
    layers: int = 8,
    width: int = 512,
    dropout: float = 0.1,
) -> memfit.Workload:
    """BERT with random weights; every second sequence is padded to three quarters.

    Args:
        batch: Number of sequences.
        sequence: Tokens per sequence.
        layers: Number of transformer blocks.
        width: Size of the hidden state; 64 per attention head.
        dropout: Probability everywhere BERT has dropout.
    """
    config = transformers.BertConfig(
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=max(width // 64, 1),
        intermediate_size=width * 4,
        vocab_size=8192,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    model = transformers.BertForMaskedLM(config)
    ids = torch.randint(0, config.vocab_size, (batch, sequence))
    attention_mask = torch.ones(batch, sequence, dtype=torch.long)
    attention_mask[1::2, sequence * 3 // 4 :] = 0
    labels = torch.where(torch.rand(batch, sequence) < 0.15, ids, -100)
    labels[:, 0] = ids[:, 0]
    return memfit.Workload(
        model=model,
        batch={"input_ids": ids, "attention_mask": attention_mask, "labels": labels},
        loss=lambda model, batch: model(**batch).loss,
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-4),
    )
