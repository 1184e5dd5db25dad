"""Real data that ships in packages, and shapes drawn here; all of it small."""

import argparse
import subprocess
import textwrap
import tokenize
import typing
from pathlib import Path

import torch


def shuffled(*columns, num_held_out, seed=0):
    """Return the rows to train on and those held out."""
    order = torch.randperm(len(columns[0]), generator=torch.Generator().manual_seed(seed))
    kept, held = order[num_held_out:], order[:num_held_out]
    return tuple(c[kept] for c in columns), tuple(c[held] for c in columns)


def digits():
    """1,440 and 357 images (1, 8, 8) in 0..1, and their digits."""
    from sklearn.datasets import load_digits  # not above: workers import this module as well

    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    return shuffled(images, torch.tensor(data.target), num_held_out=357)


def diabetes():
    """342 and 100 patients: ten measurements, and their disease's progress after a year."""
    from sklearn.datasets import load_diabetes

    features, target = load_diabetes(return_X_y=True)
    features = torch.tensor(features, dtype=torch.float32) * 20
    return shuffled(features, torch.tensor(target, dtype=torch.float32), num_held_out=100)


def library_text():
    """Python's own library: the bytes of some modules, and of another."""
    text, held_out = (
        b"".join(Path(module.__file__).read_bytes() for module in modules)
        for modules in ((argparse, typing), (textwrap,))
    )
    return [
        torch.tensor([min(byte, 127) for byte in part], dtype=torch.uint8)
        for part in (text[:120_000], held_out)
    ]


def shapes(num_images, seed, size=16):
    """Images with a disc (1) and a square (2) of one gray on noise, and masks with a margin."""
    draw = torch.Generator().manual_seed(seed)
    images = 0.3 * torch.randn(num_images, 1, size, size, generator=draw)
    masks = torch.zeros(num_images, size, size, dtype=torch.long)
    rows, columns = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
    for image, mask in zip(images, masks, strict=True):
        for kind in (1, 2):
            y, x = torch.randint(3, size - 3, (2,), generator=draw)
            far = (rows - y) ** 2 + (columns - x) ** 2
            inside = (
                far <= 9 if kind == 1 else torch.maximum((rows - y).abs(), (columns - x).abs()) <= 2
            )
            image[0][inside] += 1.0
            mask[inside] = kind
    masks[:, :, 0] = 255  # a margin that nobody looked at
    return images, masks


def lines_of_python(width=40):
    """Comments (1) and code (0) of Python's library, without the mark that would tell them."""
    rows, labels = [], []
    for module in (argparse, subprocess, typing, tokenize):
        for line in Path(module.__file__).read_text(encoding="utf-8").splitlines():
            text = line.strip()
            is_comment = text.startswith("#")
            text = text.lstrip("#").strip()[:width]
            if len(text) > 12:
                codes = [min(ord(c), 127) for c in text]
                rows.append(codes + [0] * (width - len(codes)))
                labels.append(int(is_comment))
    tokens, labels = torch.tensor(rows), torch.tensor(labels)
    comments = labels.nonzero().squeeze(1)
    code = (labels == 0).nonzero().squeeze(1)
    some = code[torch.randperm(len(code), generator=torch.Generator().manual_seed(1))]
    rows = torch.cat([comments, some[: len(comments)]])
    mask = (tokens != 0).long()
    return shuffled(tokens[rows], mask[rows], labels[rows], num_held_out=200)
