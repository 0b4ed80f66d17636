"""Low-rank adapters put into a frozen GPT-2, as PEFT does it; only they are trained and saved."""

import hashlib

import torch
import torch.nn as nn
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.pytorch_utils import Conv1D


class LoraLayer(nn.Module):
    def __init__(self, base, inside, outside, rank=8, alpha=16, dropout=0.05):
        super().__init__()
        self.base_layer = base
        self.lora_A = nn.Linear(inside, rank, bias=False)
        self.lora_B = nn.Linear(rank, outside, bias=False)
        self.lora_dropout = nn.Dropout(dropout)
        self.scaling = alpha / rank
        nn.init.zeros_(self.lora_B.weight)

    def forward(self, x):
        result = self.base_layer(x)
        return result + self.lora_B(self.lora_A(self.lora_dropout(x))) * self.scaling


def add_adapters(model, names=("c_attn", "c_fc")):
    for parameter in model.parameters():
        parameter.requires_grad = False
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if name in names and isinstance(child, Conv1D):
                inside, outside = child.weight.shape
                setattr(module, name, LoraLayer(child, inside, outside))


torch.manual_seed(20)
config = GPT2Config(vocab_size=3000, n_positions=128, n_embd=256, n_layer=4, n_head=4)
model = GPT2LMHeadModel(config)
add_adapters(model)
trainable = [p for p in model.parameters() if p.requires_grad]
everything = sum(p.numel() for p in model.parameters())
print(f"trainable params: {sum(p.numel() for p in trainable)} || all params: {everything}")
optimizer = torch.optim.AdamW(trainable, lr=3e-4)
model.train()
for step in range(8):
    ids = torch.randint(0, config.vocab_size, (4, 128))
    outputs = model(input_ids=ids, labels=ids, use_cache=False)
    outputs.loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"{step=} loss {outputs.loss.item()!r}")
adapters = {name: value for name, value in model.state_dict().items() if "lora_" in name}
torch.save(adapters, "adapter_model.pt")
print(hashlib.sha256(b"".join(v.numpy().tobytes() for v in adapters.values())).hexdigest())
