"""Prediction of waves with LSTM cells and LBFGS, whose closure runs several times a step."""

import hashlib

import torch
import torch.nn as nn


class Sequence(nn.Module):
    def __init__(self, width=51):
        super().__init__()
        self.width = width
        self.lstm1, self.lstm2 = nn.LSTMCell(1, width), nn.LSTMCell(width, width)
        self.linear = nn.Linear(width, 1)

    def forward(self, input, future=0):
        outputs = []
        h_t, c_t = torch.zeros(2, input.size(0), self.width).unbind()
        h_t2, c_t2 = torch.zeros(2, input.size(0), self.width).unbind()
        for input_t in input.split(1, dim=1):
            h_t, c_t = self.lstm1(input_t, (h_t, c_t))
            h_t2, c_t2 = self.lstm2(h_t, (h_t2, c_t2))
            output = self.linear(h_t2)
            outputs += [output]
        for _ in range(future):
            h_t, c_t = self.lstm1(output, (h_t, c_t))
            h_t2, c_t2 = self.lstm2(h_t, (h_t2, c_t2))
            output = self.linear(h_t2)
            outputs += [output]
        return torch.cat(outputs, dim=1)


torch.manual_seed(27)
places = torch.arange(81)[None] + torch.randint(-80, 80, (384, 1))
waves = torch.sin(places / 20.0)
input, target = waves[32:, :-1], waves[32:, 1:]
test_input, test_target = waves[:32, :-1], waves[:32, 1:]
seq = Sequence()
criterion = nn.MSELoss()
optimizer = torch.optim.LBFGS(seq.parameters(), lr=0.8, max_iter=4, history_size=4)
for i in range(3):
    print("STEP: ", i)

    def closure():
        optimizer.zero_grad()
        out = seq(input)
        loss = criterion(out, target)
        print("loss:", repr(loss.item()))
        loss.backward()
        return loss

    optimizer.step(closure)
    with torch.no_grad():
        pred = seq(test_input, future=20)
        print("test loss:", repr(criterion(pred[:, :-20], test_target).item()))
print(hashlib.sha256(b"".join(p.detach().numpy() for p in seq.parameters())).hexdigest())
