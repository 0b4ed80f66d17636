"""The Trainer of Hugging Face on a classifier: accumulation, padding, evaluation every epoch."""

import hashlib

import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    Trainer,
    TrainingArguments,
    default_data_collator,
)

torch.manual_seed(16)


class Sentences(torch.utils.data.Dataset):
    def __init__(self, count, seed):
        generator = torch.Generator().manual_seed(seed)
        self.tokens = torch.randint(0, 1000, (count, 64), generator=generator)
        self.labels = torch.randint(0, 2, (count,), generator=generator)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return {"input_ids": self.tokens[index], "labels": self.labels[index]}


def metrics(predicted):
    return {"accuracy": float((predicted.predictions.argmax(-1) == predicted.label_ids).mean())}


model = BertForSequenceClassification(
    BertConfig(
        vocab_size=1000,
        hidden_size=192,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=768,
        max_position_embeddings=64,
    )
)
trainer = Trainer(
    model=model,
    args=TrainingArguments(
        output_dir="out",
        num_train_epochs=2,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        eval_strategy="epoch",
        logging_steps=1,
        learning_rate=2e-4,
        warmup_steps=2,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
    ),
    train_dataset=Sentences(64, 0),
    eval_dataset=Sentences(16, 1),
    data_collator=default_data_collator,
    compute_metrics=metrics,
)
trainer.train()
for entry in trainer.state.log_history:
    kept = ("loss", "grad_norm", "eval_loss", "eval_accuracy", "epoch")
    print({key: value for key, value in entry.items() if key in kept})
print(hashlib.sha256(b"".join(p.detach().numpy() for p in model.parameters())).hexdigest())
