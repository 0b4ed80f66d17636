"""GPT-2 small from random weights: AdamW, clipped gradients, a warm-up, two accumulated batches."""

import argparse
import hashlib

import torch
from transformers import GPT2Config, GPT2LMHeadModel, get_linear_schedule_with_warmup


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=12)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--accumulate", type=int, default=2)
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = GPT2Config(
        n_layer=args.layers, n_embd=args.width, n_head=args.width // 64, use_cache=False
    )
    model = GPT2LMHeadModel(config).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    schedule = get_linear_schedule_with_warmup(optimizer, 2, args.steps)
    model.train()
    for step in range(args.steps):
        total = 0.0
        for _ in range(args.accumulate):
            ids = torch.randint(0, config.vocab_size, (args.batch_size, args.length)).to(device)
            loss = model(input_ids=ids, labels=ids).loss / args.accumulate
            loss.backward()
            total += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        print(f"step {step} loss {total!r} norm {norm.item()!r}")
    weights = b"".join(value.cpu().numpy().tobytes() for value in model.state_dict().values())
    print(hashlib.sha256(weights).hexdigest())


if __name__ == "__main__":
    main()
