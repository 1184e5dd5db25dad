"""Train a transformers model, built from a config, to distinguish comments from code.

    python examples/text_classification.py
    python examples/text_classification.py --num-workers 1 --smoke-test

The lines come from Python's standard library, without indentation and comment marks. The model is a
small DistilBERT over characters with random weights. Nothing is downloaded.
"""

import argparse
import random
import sysconfig
import tempfile
import time
from pathlib import Path

import torch

from raysgd import TorchTrainer
from raysgd.operators import SequenceClassifier
from raysgd.utils import BATCH_SIZE

WIDTH = 48
KINDS = ["code", "comment"]
EXAMPLES = [
    "return the largest of the values that were given",
    "return max(values, key=operator.itemgetter(1))",
    "if the file is closed, there is nothing to do",
    "if self.closed: return None",
]


def encoded(text):
    """Return the codes of the characters, padded with zeros."""
    numbers = [min(ord(character), 127) for character in text[:WIDTH]]
    return numbers + [0] * (WIDTH - len(numbers))


def lines(num_lines):
    """Return `num_lines` lines in a fixed order. Half of them are comments."""
    found = {kind: [] for kind in KINDS}
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        for line in path.read_text(encoding="utf-8").splitlines():
            kind = "comment" if line.strip().startswith("# ") else "code"
            text = line.strip().lstrip("#").strip()
            if len(text) > 15:
                found[kind].append(text)
    draw = random.Random(0)
    chosen = [(t, k) for k in KINDS for t in draw.sample(found[k], num_lines // 2)]
    draw.shuffle(chosen)
    return chosen


class Lines(torch.utils.data.Dataset):
    """Samples as dicts, as in transformers."""

    def __init__(self, chosen):
        self.chosen = chosen

    def __len__(self):
        return len(self.chosen)

    def __getitem__(self, index):
        text, kind = self.chosen[index]
        tokens = torch.tensor(encoded(text))
        return {
            "input_ids": tokens,
            "attention_mask": (tokens != 0).long(),
            "labels": KINDS.index(kind),
        }


class LineClassifier(SequenceClassifier):
    """A small DistilBERT."""

    def build_train_data(self, config):
        return Lines(lines(config["num_lines"])[config["num_lines"] // 5 :])

    def build_validation_data(self, config):
        return Lines(lines(config["num_lines"])[: config["num_lines"] // 5])


def to_judge():
    """Return a loader of the examples. Their labels are not used."""
    tokens = torch.tensor([encoded(text) for text in EXAMPLES])
    labels = torch.zeros(len(tokens), dtype=torch.long)
    data = torch.utils.data.TensorDataset(tokens, (tokens != 0).long(), labels)
    return torch.utils.data.DataLoader(data, batch_size=2)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-workers", type=int, default=2)
    parser.add_argument("--num-epochs", type=int, default=5)
    parser.add_argument("--use-gpu", action="store_true", help="one GPU a worker")
    parser.add_argument("--smoke-test", action="store_true", help="one short epoch, no more")
    args = parser.parse_args()
    num_epochs = 1 if args.smoke_test else args.num_epochs

    started = time.perf_counter()
    config = {
        "num_lines": 1_000 if args.smoke_test else 10_000,
        "num_classes": len(KINDS),
        "model_type": "distilbert",
        "model_config": {
            "vocab_size": 128,
            "max_position_embeddings": WIDTH,
            "dim": 64,
            "hidden_dim": 128,
            "n_layers": 2,
            "n_heads": 4,
        },
        "lr": 1e-3,
        "max_grad_norm": 1.0,
        "seed": 0,
        BATCH_SIZE: 64,
    }
    with TorchTrainer(
        training_operator_cls=LineClassifier,
        config=config,
        num_workers=args.num_workers,
        use_local=args.num_workers == 1,  # needs no Ray
        use_gpu=args.use_gpu,
    ) as trainer:
        print(f"{trainer.num_workers} workers ready after {time.perf_counter() - started:.1f} s")
        for _ in range(num_epochs):
            train, validation = trainer.train(), trainer.validate()
            print(
                f"epoch {train['epoch']:2d}   train_loss {train['train_loss']:.3f}   "
                f"val_loss {validation['val_loss']:.3f}   "
                f"val_accuracy {validation['val_accuracy']:.1%}   "
                f"val_f1 {validation['val_f1']:.1%}"
            )
        chances = trainer.predict(to_judge()).softmax(dim=1)
        with tempfile.TemporaryDirectory() as folder:  # for transformers and the Hub
            trainer.get_model(to_cpu=True).save_pretrained(folder)
            print("saved for others:", *sorted(path.name for path in Path(folder).iterdir()))
    for text, row in zip(EXAMPLES, chances, strict=True):
        print(f"{KINDS[row.argmax()]:>8} ({row.max():4.0%})   {text}")
    print(f"done in {time.perf_counter() - started:.1f} s")
    if not args.smoke_test and validation["val_accuracy"] < 0.87:
        raise SystemExit(f"val_accuracy {validation['val_accuracy']:.1%} is below 87 %")


if __name__ == "__main__":
    main()
