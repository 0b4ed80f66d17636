"""Translation with GRUs and attention: two models, two optimizers, teacher forcing, free lengths."""

import hashlib
import random

import torch
import torch.nn as nn
import torch.nn.functional as F


class EncoderRNN(nn.Module):
    def __init__(self, vocabulary, hidden):
        super().__init__()
        self.embedding, self.dropout = nn.Embedding(vocabulary, hidden), nn.Dropout(0.1)
        self.gru = nn.GRU(hidden, hidden, batch_first=True)

    def forward(self, input):
        return self.gru(self.dropout(self.embedding(input)))


class AttnDecoderRNN(nn.Module):
    def __init__(self, hidden, vocabulary):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, hidden)
        self.Wa, self.Ua = nn.Linear(hidden, hidden), nn.Linear(hidden, hidden)
        self.Va = nn.Linear(hidden, 1)
        self.gru = nn.GRU(2 * hidden, hidden, batch_first=True)
        self.out = nn.Linear(hidden, vocabulary)

    def forward(self, encoded, hidden, target):
        outputs = []
        input = torch.zeros(len(target), 1, dtype=torch.long)
        for place in range(target.size(1)):
            embedded = self.embedding(input)
            query = hidden.permute(1, 0, 2)
            scores = self.Va(torch.tanh(self.Wa(query) + self.Ua(encoded))).squeeze(2)
            context = torch.bmm(F.softmax(scores, dim=-1).unsqueeze(1), encoded)
            output, hidden = self.gru(torch.cat((embedded, context), dim=2), hidden)
            outputs.append(self.out(output))
            forced = random.random() < 0.5
            input = target[:, place, None] if forced else outputs[-1].argmax(-1).detach()
        return F.log_softmax(torch.cat(outputs, dim=1), dim=-1)


torch.manual_seed(39)
random.seed(39)
vocabulary, hidden = 1500, 128
encoder, decoder = EncoderRNN(vocabulary, hidden), AttnDecoderRNN(hidden, vocabulary)
encoder_optimizer = torch.optim.Adam(encoder.parameters(), lr=1e-3)
decoder_optimizer = torch.optim.Adam(decoder.parameters(), lr=1e-3)
criterion = nn.NLLLoss()
for step in range(9):
    source = torch.randint(0, vocabulary, (32, random.randint(8, 24)))
    target = torch.randint(0, vocabulary, (32, random.randint(8, 24)))
    encoder_optimizer.zero_grad()
    decoder_optimizer.zero_grad()
    encoded, state = encoder(source)
    decoded = decoder(encoded, state, target)
    loss = criterion(decoded.view(-1, vocabulary), target.view(-1))
    loss.backward()
    encoder_optimizer.step()
    decoder_optimizer.step()
    print(f"step {step} {source.shape[1]} -> {target.shape[1]} loss {loss.item()!r}")
state = [*encoder.parameters(), *decoder.parameters()]
print(hashlib.sha256(b"".join(p.detach().numpy() for p in state)).hexdigest())
