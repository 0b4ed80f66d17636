"""Fine-tuning what `from_pretrained` reads from a folder, with a loop of one's own."""

import hashlib

import torch
from transformers import DistilBertConfig, DistilBertForSequenceClassification

torch.manual_seed(42)
config = DistilBertConfig(
    vocab_size=8000, dim=192, n_layers=3, n_heads=4, hidden_dim=768, max_position_embeddings=96
)
DistilBertForSequenceClassification(config).save_pretrained("pretrained")
model = DistilBertForSequenceClassification.from_pretrained("pretrained", num_labels=2)
model.train()
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5)
for step in range(7):
    ids = torch.randint(0, 8000, (8, 96))
    mask = torch.ones_like(ids)
    mask[:, 80:] = 0
    loss = model(input_ids=ids, attention_mask=mask, labels=torch.randint(0, 2, (8,))).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step} loss {loss.item()!r}")
print(hashlib.sha256(b"".join(p.detach().numpy() for p in model.parameters())).hexdigest())
