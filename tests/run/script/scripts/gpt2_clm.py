"""A GPT-2 from its configuration, trained by a plain loop: clipping, warmup, evaluation."""

import argparse
import hashlib

import torch
from transformers import GPT2Config, GPT2LMHeadModel, get_linear_schedule_with_warmup

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=8)
parser.add_argument("--block-size", type=int, default=128)
parser.add_argument("--batch-size", type=int, default=4)
args = parser.parse_args()
torch.manual_seed(13)
config = GPT2Config(vocab_size=4000, n_positions=args.block_size, n_embd=192, n_layer=4, n_head=6)
model = GPT2LMHeadModel(config)
no_decay = [p for p in model.parameters() if p.dim() < 2]
decay = [p for p in model.parameters() if p.dim() >= 2]
optimizer = torch.optim.AdamW(
    [{"params": decay, "weight_decay": 0.1}, {"params": no_decay, "weight_decay": 0.0}], lr=6e-4
)
scheduler = get_linear_schedule_with_warmup(optimizer, 2, args.steps)
tokens = torch.randint(0, config.vocab_size, (20_000,))


def get_batch():
    starts = torch.randint(len(tokens) - args.block_size, (args.batch_size,))
    return torch.stack([tokens[i : i + args.block_size] for i in starts])


@torch.no_grad()
def estimate_loss():
    model.eval()
    batch = get_batch()
    loss = model(input_ids=batch, labels=batch).loss
    model.train()
    return loss.item()


model.train()
for step in range(args.steps):
    batch = get_batch()
    loss = model(input_ids=batch, labels=batch).loss
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    print(f"step {step}: loss {loss.item()!r}, norm {norm.item()!r}")
    if step % 4 == 3:
        print(f"validation {estimate_loss()!r}")
print(hashlib.sha256(b"".join(p.detach().numpy() for p in model.parameters())).hexdigest())
