"""Find discs, squares, and crosses in noisy images, pixel by pixel, with two workers.

    python examples/segmentation.py
    python examples/segmentation.py --num-workers 1 --smoke-test

The script draws the images. The mean intersection over union covers all held-out pixels, because
the operator sums one confusion matrix over batches and workers.
"""

import argparse
import time

import torch
from torch import nn

from raysgd import TorchTrainer
from raysgd.operators import SemanticSegmenter
from raysgd.utils import BATCH_SIZE

SIZE = 24
MARKS = ".osx"  # background, disc, square, cross


def shapes(num_images, seed):
    """Return noisy images (1, SIZE, SIZE) with three shapes each, and their masks."""
    draw = torch.Generator().manual_seed(seed)
    images = 0.3 * torch.randn(num_images, 1, SIZE, SIZE, generator=draw)
    masks = torch.zeros(num_images, SIZE, SIZE, dtype=torch.long)
    rows, columns = torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij")
    for image, mask in zip(images, masks, strict=True):
        for kind in torch.randint(1, 4, (3,), generator=draw).tolist():
            y, x = torch.randint(4, SIZE - 4, (2,), generator=draw).tolist()
            down, across = (rows - y).abs(), (columns - x).abs()
            inside = {
                1: down**2 + across**2 <= 12,
                2: (down <= 3) & (across <= 3),
                3: ((down <= 1) & (across <= 4)) | ((across <= 1) & (down <= 4)),
            }[kind]
            image[0][inside] += 1
            mask[inside] = kind
    return images, masks


class Finder(SemanticSegmenter):
    def build_model(self, config):
        layers, width = [], 1
        for dilation in (1, 2, 4, 1):
            layers += [
                nn.Conv2d(width, 24, 3, padding=dilation, dilation=dilation, bias=False),
                nn.BatchNorm2d(24),
                nn.ReLU(),
            ]
            width = 24
        return nn.Sequential(*layers, nn.Conv2d(width, len(MARKS), 1))

    def build_train_data(self, config):
        return shapes(config["num_images"], seed=0)

    def build_validation_data(self, config):
        return shapes(200, seed=1)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-workers", type=int, default=2)
    parser.add_argument("--num-epochs", type=int, default=8)
    parser.add_argument("--use-gpu", action="store_true", help="one GPU a worker")
    parser.add_argument("--smoke-test", action="store_true", help="one short epoch, no more")
    args = parser.parse_args()
    num_epochs = 1 if args.smoke_test else args.num_epochs

    started = time.perf_counter()
    config = {
        "num_images": 200 if args.smoke_test else 1_500,
        "lr": 0.01,
        "seed": 0,
        BATCH_SIZE: 32,
    }
    with TorchTrainer(
        training_operator_cls=Finder,
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
                f"val_pixel_accuracy {validation['val_pixel_accuracy']:.1%}   "
                f"val_mean_iou {validation['val_mean_iou']:.1%}"
            )
        model = trainer.get_model(to_cpu=True)

    images, masks = shapes(2, seed=2)
    with torch.no_grad():
        found = model.eval()(images).argmax(dim=1)
    for mask, guess in zip(masks, found, strict=True):
        print(f"\n{'drawn':<{SIZE}}   found")
        for row in range(SIZE):
            sides = ("".join(MARKS[kind] for kind in side[row]) for side in (mask, guess))
            print("   ".join(sides))
    print(f"done in {time.perf_counter() - started:.1f} s")
    if not args.smoke_test and validation["val_mean_iou"] < 0.8:
        raise SystemExit(f"val_mean_iou {validation['val_mean_iou']:.1%} is below 80 %")


if __name__ == "__main__":
    main()
