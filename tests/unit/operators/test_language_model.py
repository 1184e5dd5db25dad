"""Language models: exact perplexity, tied weights, generation, and windows of a text."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from raysgd.metrics import Sums
from raysgd.operators import LanguageModel
from raysgd.operators.language_model import TokenWindows, _perplexity
from raysgd.testing import run_operator
from tests.operators import local

SMALL = {"vocab_size": 128, "hidden_size": 32, "num_heads": 2, "sequence_length": 32}


def test_perplexity_is_that_of_all_tokens_whatever_the_batches():
    """The last sequence is short, so a mean over batches would differ."""
    text = torch.arange(75) * 7 % 64
    found = {}
    for batch_size in (1, 2, 5):
        config = {**SMALL, "vocab_size": 64, "validation_data": text, "seed": 0}
        operator = run_operator(LanguageModel, {**config, "batch_size": batch_size})
        found[batch_size] = operator.validate(iter(operator.validation_loader))
    windows = operator.validation_loader.dataset
    logs = [operator.model.eval()(tokens[None])[0].log_softmax(dim=1) for tokens, _ in windows]
    nats = [
        -log[place, target].item()
        for log, (_, targets) in zip(logs, windows, strict=True)
        for place, target in enumerate(targets.tolist())
        if target != -100
    ]
    assert len(nats) == 74
    for metrics in found.values():
        assert metrics["val_perplexity"] == pytest.approx(math.exp(sum(nats) / 74), rel=1e-6)
        assert metrics["num_samples"] == 3


def test_weights_are_tied_and_stay_so(tmp_path):
    config = {**SMALL, "train_data": torch.arange(128)}
    with local(LanguageModel, config) as trainer:
        trainer.train()
        trainer.load(trainer.save(tmp_path / "state.pt"))
        trainer.train()
        model = trainer.get_model()
    assert model.tokens.weight is model.scores.weight


def test_batches_may_be_tokens_or_tokens_and_targets():
    operator = run_operator(LanguageModel, SMALL)
    tokens = torch.arange(20).reshape(2, 10)
    expected = operator.validate(iter([(tokens[:, :-1], tokens[:, 1:])]))
    for batch in (tokens, (tokens,), [tokens]):
        assert operator.validate(iter([batch]))["val_loss"] == expected["val_loss"]


def test_a_model_of_ones_own_may_give_an_object_with_logits():
    class Output:
        def __init__(self, logits):
            self.logits = logits

    class Own(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.table = torch.nn.Embedding(8, 8)

        def forward(self, tokens):
            return Output(self.table(tokens))

    operator = run_operator(LanguageModel, {"model": Own()})
    found = operator.train_batch(torch.arange(8).reshape(2, 4), {})
    assert found["train_loss"].compute() > 0
    operator.model.table.eval()
    assert len(operator.generate([1], 3)) == 3
    assert (operator.model.training, operator.model.table.training) == (True, False)


def test_only_earlier_tokens_are_seen():
    model = run_operator(LanguageModel, SMALL).model.eval()
    tokens = torch.randint(128, (1, 10), generator=torch.Generator().manual_seed(0))
    changed = tokens.clone()
    changed[0, 6:] = 5
    assert torch.allclose(model(tokens)[0, :6], model(changed)[0, :6], atol=1e-5)
    assert not torch.allclose(model(tokens)[0, 6:], model(changed)[0, 6:], atol=1e-5)


def test_generates_what_it_has_learned():
    text = torch.arange(400) % 9  # each token occurs at each position
    config = {**SMALL, "vocab_size": 10, "sequence_length": 8, "train_data": text, "lr": 0.01}
    config |= {"batch_size": 10, "seed": 0}
    with local(LanguageModel, config) as trainer:
        trainer.train(num_steps=60)
        (made,) = trainer.apply_all_operators(lambda op: op.generate([3], 12, temperature=0))
        assert made == [n % 9 for n in range(4, 16)]
        draws = trainer.apply_all_operators(
            lambda op: [op.generate([3, 4], 5, temperature=5.0, seed=s) for s in (1, 1, 2)]
        )[0]
        assert draws[0] == draws[1] != draws[2]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, r"config\['vocab_size'\] is missing"),
        ({**SMALL, "train_data": torch.zeros(1, dtype=torch.long)}, "at least two tokens"),
        ({**SMALL, "train_data": torch.zeros(9)}, r"of torch\.float32"),
    ],
)
def test_wrong_configs_are_refused(config, message):
    with pytest.raises(ValueError, match=message):
        run_operator(LanguageModel, config)


def test_sequences_that_are_too_long_for_the_model_are_refused():
    operator = run_operator(LanguageModel, SMALL)
    with pytest.raises(ValueError, match=r"40 tokens, but .* at most 32: .*sequence_length"):
        operator.train_batch((torch.zeros(2, 41, dtype=torch.long),), {})


def test_the_perplexity_of_a_huge_loss_is_infinite_and_of_nan_is_nan():
    sums = (Sums(_perplexity, total=each, weight=1) for each in (math.nan, math.inf, 800.0))
    of_nan, *of_huge = (each.compute() for each in sums)
    assert math.isnan(of_nan)
    assert of_huge == [math.inf, math.inf]


@given(st.integers(2, 60), st.integers(1, 20))
def test_targets_are_the_text_without_its_first_token_and_inputs_come_before(size, length):
    windows = TokenWindows(torch.arange(size), length)
    samples = list(windows)  # up to an IndexError
    assert len(samples) == len(windows)
    targets = torch.cat([target for _, target in samples])
    inputs = torch.cat([tokens for tokens, _ in samples])
    counts = targets != -100
    assert targets[counts].tolist() == list(range(1, size))
    assert inputs[counts].tolist() == list(range(size - 1))
    assert {tuple(t.shape) for sample in samples for t in sample} == {(length,)}
