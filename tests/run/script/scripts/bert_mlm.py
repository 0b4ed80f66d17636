"""Masked language modelling with BERT; a collator pads each batch to its longest sentence."""

import hashlib

import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForMaskedLM

torch.manual_seed(14)
PAD, MASK, VOCABULARY = 0, 1, 3000
sentences = [torch.randint(2, VOCABULARY, (int(n),)) for n in torch.randint(24, 128, (64,))]


def collate(batch):
    ids = pad_sequence(batch, batch_first=True, padding_value=PAD)
    labels = ids.clone()
    masked = (torch.rand(ids.shape) < 0.15) & (ids != PAD)
    labels[~masked] = -100
    ids[masked] = MASK
    return {
        "input_ids": ids,
        "attention_mask": (labels.ne(PAD) & ids.ne(PAD)).long(),
        "labels": labels,
    }


config = BertConfig(
    vocab_size=VOCABULARY,
    hidden_size=192,
    num_hidden_layers=4,
    num_attention_heads=4,
    intermediate_size=768,
    max_position_embeddings=128,
)
model = BertForMaskedLM(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
loader = DataLoader(sentences, batch_size=8, shuffle=True, collate_fn=collate)
for epoch in range(1):
    model.train()
    for batch in loader:
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"epoch {epoch} length {batch['input_ids'].shape[1]} loss {loss.item()!r}")
print(hashlib.sha256(b"".join(p.detach().numpy() for p in model.parameters())).hexdigest())
