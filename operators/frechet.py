"""The Fréchet distance of two sets of features."""

from __future__ import annotations

import torch

from raysgd.metrics import Sums

__all__ = ["frechet_distance", "moments"]


def frechet_distance(
    count: float,
    real: torch.Tensor,
    real_products: torch.Tensor,
    fake: torch.Tensor,
    fake_products: torch.Tensor,
) -> float:
    """Return the squared Fréchet distance of two normal distributions, given their moments.

    ``|m - n|² + tr(S + T - 2 (S T)^½)`` for means m, n and covariances S, T (Dowson and Landau
    1982). With features of an Inception network, it is the FID of Heusel et al. 2017, "GANs Trained
    by a Two Time-Scale Update Rule", arXiv:1706.08500.

    Args:
        count: Number of samples in each set.
        real: Sum of the features in the first set.
        real_products: Sum of the outer products of its features.
        fake: Sum of the features in the second set.
        fake_products: Sum of the outer products of its features.

    Returns:
        The squared distance. NaN for fewer than two samples or features that are not finite.
    """
    clouds = []
    for total, products in ((real, real_products), (fake, fake_products)):
        # The sums of a single feature arrive as plain numbers.
        mean = torch.as_tensor(total, dtype=torch.float64).reshape(-1) / count
        moment = torch.as_tensor(products, dtype=torch.float64).reshape(len(mean), len(mean))
        if count < 2 or not bool(moment.isfinite().all()):
            return float("nan")
        clouds.append((mean, (moment - count * torch.outer(mean, mean)) / (count - 1)))
    (mean, one), (other_mean, other) = clouds
    root = _root(one)
    # S T and S^½ T S^½ have the same eigenvalues, and the latter is symmetric.
    shared = torch.linalg.eigvalsh(root @ other @ root).clamp(min=0).sqrt().sum()
    distance = (mean - other_mean).square().sum() + one.trace() + other.trace() - 2 * shared
    return max(0.0, float(distance))


def moments(real: torch.Tensor, fake: torch.Tensor) -> Sums:
    """Return the moments of two batches of features, (batch, ...) each, as a metric."""
    sums = {}
    for name, given in (("real", real), ("fake", fake)):
        features = given.double().reshape(len(given), -1)
        sums[name] = torch.atleast_1d(features.sum(dim=0))
        sums[f"{name}_products"] = features.T @ features
    return Sums(frechet_distance, count=len(real), **sums)


def _root(matrix: torch.Tensor) -> torch.Tensor:
    values, vectors = torch.linalg.eigh(matrix)
    root: torch.Tensor = (vectors * values.clamp(min=0).sqrt()) @ vectors.T
    return root
