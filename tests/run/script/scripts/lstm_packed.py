"""Sentiment of packed sequences with an LSTM; the lengths of a batch are never those of another."""

import hashlib

import torch
import torch.nn as nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence

torch.manual_seed(24)


class Sentiment(nn.Module):
    def __init__(self, vocabulary=2000, embedding=96, hidden=128):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, embedding, padding_idx=0)
        self.lstm = nn.LSTM(embedding, hidden, 2, bidirectional=True, dropout=0.3, batch_first=True)
        self.score = nn.Linear(2 * hidden, 1)
        self.fc = nn.Linear(2 * hidden, 2)

    def forward(self, text, lengths):
        packed = pack_padded_sequence(
            self.embed(text), lengths, batch_first=True, enforce_sorted=False
        )
        output, _ = pad_packed_sequence(self.lstm(packed)[0], batch_first=True)
        scores = self.score(output).squeeze(-1).masked_fill(text.eq(0), -1e9)
        pooled = (scores.softmax(1).unsqueeze(-1) * output).sum(1)
        return self.fc(pooled)


def collate(batch):
    texts, labels = zip(*batch)
    lengths = torch.tensor([len(text) for text in texts])
    return pad_sequence(texts, batch_first=True), lengths, torch.stack(labels)


data = [
    (torch.randint(1, 2000, (int(length),)), torch.randint(0, 2, ()))
    for length in torch.randint(20, 110, (96,))
]
loader = torch.utils.data.DataLoader(data, batch_size=16, shuffle=True, collate_fn=collate)
model = Sentiment()
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.Adagrad(model.parameters(), lr=1e-2)
for epoch in range(1):
    for text, lengths, labels in loader:
        optimizer.zero_grad()
        loss = criterion(model(text, lengths), labels)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        print(f"epoch {epoch} longest {text.shape[1]} loss {loss.item()!r}")
print(hashlib.sha256(b"".join(p.detach().numpy() for p in model.parameters())).hexdigest())
