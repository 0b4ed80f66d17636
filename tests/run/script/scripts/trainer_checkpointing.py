"""The Trainer of Hugging Face with gradient checkpointing, as people turn it on to save memory."""

import hashlib

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

torch.manual_seed(17)
tokens = torch.randint(0, 2000, (24, 128))
data = [{"input_ids": row, "labels": row} for row in tokens]
model = GPT2LMHeadModel(
    GPT2Config(vocab_size=2000, n_positions=128, n_embd=192, n_layer=4, n_head=6, use_cache=False)
)
arguments = TrainingArguments(
    output_dir="out",
    max_steps=8,
    per_device_train_batch_size=6,
    gradient_checkpointing=True,
    logging_steps=1,
    report_to=[],
    save_strategy="no",
    use_cpu=True,
    disable_tqdm=True,
)
trainer = Trainer(model=model, args=arguments, train_dataset=data)
trainer.train()
for entry in trainer.state.log_history:
    print({key: value for key, value in entry.items() if key in ("loss", "grad_norm", "epoch")})
print(hashlib.sha256(b"".join(p.detach().numpy() for p in model.parameters())).hexdigest())
