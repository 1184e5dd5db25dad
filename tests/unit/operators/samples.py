"""Sample images: the digits of scikit-learn, and generated shapes."""

import torch


def digits():
    """Return 1,440 training and 357 validation images of shape (1, 8, 8) in 0..1, with labels."""
    from sklearn.datasets import load_digits  # not at the top: workers import this module too

    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    columns = images[order], torch.tensor(data.target)[order]
    return tuple(c[357:] for c in columns), tuple(c[:357] for c in columns)


def shapes(num_images, seed, size=16):
    """Return noisy images with a disc (class 1) and a square (class 2), and their masks."""
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
    masks[:, :, 0] = 255  # an unlabeled margin
    return images, masks
