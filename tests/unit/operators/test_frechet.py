"""The distance of two clouds against its definition with a general matrix root."""

import math

import numpy as np
import pytest
import scipy.linalg
import torch

from raysgd.operators.frechet import moments


def cloud(seed, size=200, features=5):
    draw = torch.Generator().manual_seed(seed)
    mixing = torch.randn(features, features, generator=draw)
    return torch.randn(size, features, generator=draw) @ mixing + torch.randn(1, generator=draw)


def by_definition(real, fake):
    real, fake = real.double().numpy(), fake.double().numpy()
    one, other = np.cov(real, rowvar=False), np.cov(fake, rowvar=False)
    root = scipy.linalg.sqrtm(one @ other).real
    far = ((real.mean(axis=0) - fake.mean(axis=0)) ** 2).sum()
    return far + np.trace(one + other - 2 * root)


def test_it_is_the_distance_by_definition_also_in_parts():
    real, fake = cloud(0), cloud(1)
    expected = by_definition(real, fake)
    assert expected > 1
    assert moments(real, fake).compute() == pytest.approx(expected, rel=1e-6)
    parts = [moments(real[a:b], fake[a:b]) for a, b in ((0, 1), (1, 150), (150, 200))]
    merged = parts[0].merge(parts[1]).merge(parts[2])
    assert merged.compute() == pytest.approx(expected, rel=1e-6)


def test_of_a_cloud_and_itself_it_is_zero():
    assert moments(cloud(0), cloud(0)).compute() == pytest.approx(0, abs=1e-6)


def test_one_feature_is_enough_and_one_sample_is_not():
    real, fake = cloud(0, features=1), cloud(1, features=1)
    expected = (real.mean() - fake.mean()) ** 2 + (real.std() - fake.std()) ** 2
    assert moments(real, fake).compute() == pytest.approx(expected.item(), rel=1e-5)
    assert math.isnan(moments(real[:1], fake[:1]).compute())


def test_features_that_are_not_finite_give_nan():
    """A generator that has diverged: no reason to end the run."""
    fake = cloud(1)
    fake[3, 2] = math.nan
    assert math.isnan(moments(cloud(0), fake).compute())
    fake[3, 2] = math.inf
    assert math.isnan(moments(cloud(0), fake).compute())
