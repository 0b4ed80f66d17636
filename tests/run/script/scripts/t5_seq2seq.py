"""T5 for translation: sources and targets of many lengths, Adafactor's neighbour RAdam, generation."""

import hashlib
import random

import torch
from transformers import T5Config, T5ForConditionalGeneration

torch.manual_seed(15)
random.seed(15)
config = T5Config(
    vocab_size=2000,
    d_model=128,
    d_kv=32,
    d_ff=512,
    num_layers=3,
    num_heads=4,
    dropout_rate=0.1,
    decoder_start_token_id=0,
)
model = T5ForConditionalGeneration(config)
optimizer = torch.optim.RAdam(model.parameters(), lr=1e-3)


def batches(count, size=8):
    for _ in range(count):
        source, target = random.randint(40, 120), random.randint(30, 100)
        ids = torch.randint(2, config.vocab_size, (size, source))
        mask = torch.ones_like(ids)
        mask[0, source // 2 :] = 0
        labels = torch.randint(2, config.vocab_size, (size, target))
        labels[1, target // 2 :] = -100
        yield {"input_ids": ids, "attention_mask": mask, "labels": labels}


for epoch in range(2):
    model.train()
    total = 0.0
    for batch in batches(4):
        outputs = model(**batch)
        outputs.loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        total += outputs.loss.item()
        print(f"epoch {epoch} {tuple(batch['input_ids'].shape)} loss {outputs.loss.item()!r}")
    model.eval()
    with torch.no_grad():
        written = model.generate(batch["input_ids"][:1], max_new_tokens=4, do_sample=False)
    print(f"epoch {epoch} mean {total / 4!r} wrote {written.tolist()}")
print(hashlib.sha256(b"".join(p.detach().numpy() for p in model.parameters())).hexdigest())
