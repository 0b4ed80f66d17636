"""Fine-tuning with the Trainer of Hugging Face, twice, on random tokens."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments


class Tokens(torch.utils.data.Dataset):
    def __init__(self):
        generator = torch.Generator().manual_seed(0)
        self.tokens = torch.randint(0, 500, (36, 64), generator=generator)

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


for passes in (1, 2):
    torch.manual_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=500, n_positions=64, n_embd=64, n_layer=4, n_head=4, use_cache=False)
    )
    arguments = TrainingArguments(
        output_dir="out",
        num_train_epochs=2,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=passes,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
        seed=3,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=Tokens())
    trainer.train()
    for entry in trainer.state.log_history:
        print(
            {k: v for k, v in entry.items() if k in {"loss", "grad_norm", "learning_rate", "epoch"}}
        )
    torch.save(model.state_dict(), f"trained-{passes}.pt")
