"""T5 small, encoder and decoder, with dropout and Adafactor.

Run it with `memfit verify examples/t5.py:build --budget 50%`.
"""

import torch
import transformers

import memfit


def build(
    batch: int = 8,
    sequence: int = 128,
    layers: int = 6,
    width: int = 512,
    dropout: float = 0.1,
) -> memfit.Workload:
    """T5 with random weights.

    Args:
        batch: Number of sequence pairs.
        sequence: Tokens per sequence, in and out.
        layers: Number of blocks in the encoder, and in the decoder.
        width: Size of the hidden state; 64 per attention head.
        dropout: Probability everywhere T5 has dropout.
    """
    config = transformers.T5Config(
        d_model=width,
        d_ff=width * 4,
        d_kv=64,
        num_layers=layers,
        num_heads=max(width // 64, 1),
        vocab_size=8192,
        dropout_rate=dropout,
        decoder_start_token_id=0,
        use_cache=False,
    )
    model = transformers.T5ForConditionalGeneration(config)
    ids = torch.randint(1, config.vocab_size, (batch, sequence))
    return memfit.Workload(
        model=model,
        batch={"input_ids": ids, "labels": ids.flip(1)},
        loss=lambda model, batch: model(**batch).loss,
        optimizer=lambda params: torch.optim.Adafactor(params, lr=1e-3),
    )
