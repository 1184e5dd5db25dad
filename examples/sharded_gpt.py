"""Shard a small GPT over three workers, lose one, continue, and load the model elsewhere.

    python examples/sharded_gpt.py
    python examples/sharded_gpt.py --num-workers 1 --smoke-test

The model comes from transformers. It learns to write Python code, character by character. Worker 1
is killed, and the others take over its rows. A single process resumes from the last checkpoint.
Finally, the weights are saved as safetensors and loaded with transformers. (Needs
``pip install "raysgd[operators]"``.)
"""

import argparse
import json
import tempfile
import time
from pathlib import Path

import ray
import torch
from torch.utils.data import DataLoader, TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.models.gpt2.modeling_gpt2 import GPT2Block

from raysgd import TorchTrainer, TrainingOperator
from raysgd.callbacks import CheckpointCallback
from raysgd.testing import chaos

LENGTH = 64


def gpt_config(width):
    return GPT2Config(
        vocab_size=128,
        n_positions=LENGTH,
        n_embd=width,
        n_layer=4,
        n_head=4,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    )


def sequences(count):
    """Return characters of a standard library module, in rows."""
    text = Path(json.decoder.__file__).read_text() + Path(argparse.__file__).read_text()
    codes = torch.tensor([min(ord(character), 127) for character in text])
    return codes[: count * LENGTH].view(count, LENGTH)


class Writer(TrainingOperator):
    def setup(self, config):
        torch.manual_seed(0)
        model = GPT2LMHeadModel(gpt_config(config["width"]))
        self.model, self.optimizer = self.register(
            models=model,
            optimizers=torch.optim.AdamW(model.parameters(), lr=1e-3),
            sharding="full",
            sharding_args={"wrap_classes": GPT2Block},
        )
        data = TensorDataset(sequences(config["num_sequences"]))
        self.register_data(
            train_loader=DataLoader(data, batch_size=8, shuffle=True),
            validation_loader=DataLoader(data, batch_size=8),
        )

    def forward(self, batch):
        (tokens,) = batch
        return self.model(input_ids=tokens, labels=tokens).loss

    def train_batch(self, batch, batch_info):
        loss = self.forward(batch)
        self.backward(loss)
        self.optimizer_step(self.optimizer)
        return {"train_loss": loss.detach(), "num_samples": len(batch[0])}

    def validate_batch(self, batch, batch_info):
        return {"val_loss": self.forward(batch), "num_samples": len(batch[0])}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-workers", type=int, default=3)
    parser.add_argument("--num-epochs", type=int, default=3)
    parser.add_argument("--smoke-test", action="store_true", help="a small model")
    args = parser.parse_args()
    width = 32 if args.smoke_test else 256
    started = time.perf_counter()
    if args.num_workers > 1 and not ray.is_initialized():
        ray.init("local", num_cpus=args.num_workers, log_to_driver=False)
    config = {"width": width, "num_sequences": 48 if args.smoke_test else 480}
    saved = tempfile.TemporaryDirectory()
    with TorchTrainer(
        training_operator_cls=Writer,
        config=config,
        num_workers=args.num_workers,
        use_local=args.num_workers == 1,  # needs no Ray
        callbacks=[CheckpointCallback(saved.name, keep=1)],
    ) as trainer:
        for epoch in range(args.num_epochs):
            if epoch == 1 and args.num_workers > 1:
                chaos.kill(trainer, 1)
            loss = trainer.train()["train_loss"]
            print(f"epoch {epoch + 1}   train_loss {loss:.3f}   {trainer.num_workers} workers")
        found = trainer.validate()["val_loss"]
        print("events:", ", ".join(event.kind for event in trainer.events) or "none")
        with tempfile.TemporaryDirectory() as folder:
            trainer.save_model(Path(folder, "model.safetensors"))
            gpt_config(width).save_pretrained(folder)
            model = GPT2LMHeadModel.from_pretrained(folder).eval()
    with (
        saved,
        TorchTrainer(
            training_operator_cls=Writer,
            config=config,
            use_local=True,
            callbacks=[CheckpointCallback(saved.name)],
        ) as alone,
    ):
        resumed = alone.validate()["val_loss"]
        print(f"val_loss of one process, which has gone on from epoch {alone.epoch}: {resumed:.4f}")
        assert abs(found - resumed) < 1e-3
    with torch.no_grad():
        tokens = sequences(48 if args.smoke_test else 480)
        losses = [model(input_ids=part, labels=part).loss for part in tokens.split(8)]
    again = torch.stack(losses).mean().item()
    print(f"val_loss {found:.4f}, of the model that transformers has loaded {again:.4f}")
    assert abs(found - again) < 1e-3
    print(f"done in {time.perf_counter() - started:.1f} s")


if __name__ == "__main__":
    main()
