"""A loop of one's own under Accelerate: prepared objects, accumulation, clipping."""

import argparse
import hashlib

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification, get_scheduler

parser = argparse.ArgumentParser()
parser.add_argument("--num_train_epochs", type=int, default=2)
parser.add_argument("--gradient_accumulation_steps", type=int, default=2)
args = parser.parse_args()
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=args.gradient_accumulation_steps)
torch.manual_seed(18)
config = BertConfig(
    vocab_size=1500,
    hidden_size=160,
    num_hidden_layers=4,
    num_attention_heads=4,
    intermediate_size=640,
    max_position_embeddings=96,
    num_labels=3,
)
model = BertForSequenceClassification(config)
data = [
    {"input_ids": torch.randint(0, 1500, (96,)), "labels": torch.randint(0, 3, ())}
    for _ in range(48)
]
train_dataloader = DataLoader(data, shuffle=True, batch_size=8)
eval_dataloader = DataLoader(data[:8], batch_size=8)
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5)
model, optimizer, train_dataloader, eval_dataloader = accelerator.prepare(
    model, optimizer, train_dataloader, eval_dataloader
)
scheduler = accelerator.prepare(
    get_scheduler("linear", optimizer, num_warmup_steps=0, num_training_steps=6)
)
for epoch in range(args.num_train_epochs):
    model.train()
    for batch in train_dataloader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        accelerator.print(f"epoch {epoch} loss {loss.item()!r}")
    model.eval()
    for batch in eval_dataloader:
        with torch.no_grad():
            predictions = model(**batch).logits.argmax(dim=-1)
        predictions, references = accelerator.gather_for_metrics((predictions, batch["labels"]))
        accelerator.print(f"epoch {epoch} accuracy {(predictions == references).float().mean()!r}")
model = accelerator.unwrap_model(model)
print(hashlib.sha256(b"".join(p.detach().numpy() for p in model.parameters())).hexdigest())
