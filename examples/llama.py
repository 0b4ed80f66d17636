"""A small Llama with grouped-query attention and attention dropout.

Run it with `memfit verify examples/llama.py:build --budget 50%`.
"""

import torch
import transformers

import memfit


def build(
    batch: int = 8,
    sequence: int = 256,
    layers: int = 8,
    width: int = 512,
    dropout: float = 0.1,
) -> memfit.Workload:
    """Llama with random weights.

    Args:
        batch: Number of sequences.
        sequence: Tokens per sequence.
        layers: Number of transformer blocks.
        width: Size of the hidden state; 64 per attention head.
        dropout: Probability in attention.
    """
    heads = max(width // 64, 2)
    config = transformers.LlamaConfig(
        hidden_size=width,
        intermediate_size=width * 4,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        vocab_size=16000,
        attention_dropout=dropout,
        use_cache=False,
    )
    model = transformers.LlamaForCausalLM(config)
    ids = torch.randint(0, config.vocab_size, (batch, sequence))
    return memfit.Workload(
        model=model,
        batch={"input_ids": ids, "labels": ids},
        loss=lambda model, batch: model(**batch).loss,
        optimizer=lambda params: torch.optim.AdamW(params, lr=3e-4),
    )
