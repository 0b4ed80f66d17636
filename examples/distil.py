"""A small Llama that learns from a larger one, both within one budget.

Run it with `memfit verify examples/distil.py:build --budget 50% --offload /tmp`.
"""

import torch
import transformers

import memfit


def llama(layers: int, width: int) -> transformers.LlamaForCausalLM:
    """Llama with random weights.

    Args:
        layers: Number of transformer blocks.
        width: Size of the hidden state; 64 per attention head.
    """
    config = transformers.LlamaConfig(
        hidden_size=width,
        intermediate_size=width * 8 // 3,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        vocab_size=4000,
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config)


def build(batch: int = 4, sequence: int = 128) -> memfit.Workload:
    """Teacher of 6 layers of 384, student of 2 layers of 256.

    Args:
        batch: Number of sequences.
        sequence: Tokens per sequence.
    """
    ids = torch.randint(0, 4000, (batch, sequence))
    student = memfit.Workload(
        model=llama(layers=2, width=256),
        batch={"input_ids": ids, "labels": ids},
        loss=lambda model, batch: model(**batch).loss,
        optimizer=lambda params: torch.optim.AdamW(params, lr=3e-4),
    )
    teacher = memfit.Workload(model=llama(layers=6, width=384), batch={"input_ids": ids})
    return memfit.distil(teacher, student, temperature=2.0)
