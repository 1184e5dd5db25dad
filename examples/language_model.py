"""Train a character model on Python's standard library, and generate text.

    python examples/language_model.py
    python examples/language_model.py --num-workers 1 --smoke-test

The perplexity covers all held-out characters, for any number of workers. The operator sums nats and
characters over batches and workers before it takes the exponential.
"""

import argparse
import functools
import sysconfig
import time
from pathlib import Path

import torch

from raysgd import TorchTrainer
from raysgd.operators import LanguageModel
from raysgd.utils import BATCH_SIZE

HELD_OUT = "textwrap.py"
CHARACTERS = ["\n", *map(chr, range(32, 127))]
NUMBERS = {character: number for number, character in enumerate(CHARACTERS)}


def encoded(text):
    """Return the ASCII codes of the characters. Other characters become question marks."""
    return [NUMBERS.get(character, NUMBERS["?"]) for character in text]


def library(config, held_out):
    """Return the text of standard library modules as a tensor of characters."""
    folder = Path(sysconfig.get_path("stdlib"))
    paths = [folder / HELD_OUT] if held_out else sorted(set(folder.glob("*.py")))
    text = ""
    for path in paths:
        if (path.name == HELD_OUT) == held_out and len(text) < config["num_characters"]:
            text += path.read_text(encoding="utf-8")
    return torch.tensor(encoded(text[: config["num_characters"]]), dtype=torch.uint8)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-workers", type=int, default=2)
    parser.add_argument("--num-epochs", type=int, default=3)
    parser.add_argument("--prompt", default="def ", help="beginning of the text to write")
    parser.add_argument("--use-gpu", action="store_true", help="one GPU a worker")
    parser.add_argument("--smoke-test", action="store_true", help="a short epoch, no more")
    args = parser.parse_args()
    num_epochs = 1 if args.smoke_test else args.num_epochs

    started = time.perf_counter()
    config = {
        "train_data": functools.partial(library, held_out=False),
        "validation_data": functools.partial(library, held_out=True),
        "num_characters": 60_000 if args.smoke_test else 1_000_000,
        "vocab_size": len(CHARACTERS),
        "sequence_length": 64,
        "hidden_size": 96,
        "lr": 5e-3,
        "max_grad_norm": 1.0,
        "seed": 0,
        BATCH_SIZE: 32,
    }
    with TorchTrainer(
        training_operator_cls=LanguageModel,
        config=config,
        num_workers=args.num_workers,
        use_local=args.num_workers == 1,  # needs no Ray
        use_gpu=args.use_gpu,
    ) as trainer:
        print(f"{trainer.num_workers} workers ready after {time.perf_counter() - started:.1f} s")
        print(f"perplexity before training {trainer.validate()['val_perplexity']:.1f}")
        for _ in range(num_epochs):
            train, validation = trainer.train(), trainer.validate()
            print(
                f"epoch {train['epoch']:2d}   train_loss {train['train_loss']:.3f} nats   "
                f"val_loss {validation['val_loss']:.3f} nats   "
                f"val_perplexity {validation['val_perplexity']:.2f}   "
                f"val_accuracy {validation['val_accuracy']:.1%}"
            )
        write = functools.partial(
            LanguageModel.generate,
            tokens=encoded(args.prompt),
            num_tokens=100 if args.smoke_test else 400,
            temperature=0.9,
            seed=0,
        )
        written = trainer.apply_all_operators(write)[0]
    text = args.prompt + "".join(CHARACTERS[number] for number in written)
    print("\nwhat it writes\n" + "\n".join(f"  | {line.rstrip()}" for line in text.split("\n")))
    print(f"done in {time.perf_counter() - started:.1f} s")
    if not args.smoke_test and validation["val_perplexity"] > 6.5:
        raise SystemExit(f"val_perplexity {validation['val_perplexity']:.2f} is above 6.5")


if __name__ == "__main__":
    main()
