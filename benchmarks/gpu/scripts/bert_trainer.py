"""BERT for masked words with the Trainer of transformers."""

import argparse
import hashlib
import tempfile

import torch
from transformers import BertConfig, BertForMaskedLM, Trainer, TrainingArguments


class Words(torch.utils.data.Dataset):
    def __init__(self, count, length, vocabulary):
        self.ids = torch.randint(5, vocabulary, (count, length))

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--steps", type=int, default=6)
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    config = BertConfig(
        num_hidden_layers=args.layers,
        hidden_size=args.width,
        num_attention_heads=args.width // 64,
        intermediate_size=4 * args.width,
    )
    model = BertForMaskedLM(config)
    data = Words(args.steps * args.batch_size, args.length, config.vocab_size)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            per_device_train_batch_size=args.batch_size,
            num_train_epochs=1,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            dataloader_pin_memory=torch.cuda.is_available(),
        )
        trainer = Trainer(model=model, args=arguments, train_dataset=data)
        trainer.train()
    for entry in trainer.state.log_history:
        if "loss" in entry:
            print(f"step {entry['step']} loss {entry['loss']!r} norm {entry['grad_norm']!r}")
    weights = b"".join(value.cpu().numpy().tobytes() for value in model.state_dict().values())
    print(hashlib.sha256(weights).hexdigest())


if __name__ == "__main__":
    main()
