"""Sample images: the digits of scikit-learn."""

import torch


def digits():
    """Return 1,440 training and 357 validation images of shape (1, 8, 8) in 0..1, with labels."""
    from sklearn.datasets import load_digits  # not at the top: workers import this module too

    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    columns = images[order], torch.tensor(data.target)[order]
    return tuple(c[357:] for c in columns), tuple(c[:357] for c in columns)
