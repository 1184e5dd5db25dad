"""The next token of a text."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch.nn import functional

from raysgd.metrics import Sums, ratio
from raysgd.operators.causal_transformer import CausalTransformer
from raysgd.operators.options import Option, any_of, flag, integer, number
from raysgd.operators.supervised import SupervisedOperator, in_full_precision
from raysgd.operators.token_windows import TokenWindows

__all__ = ["LanguageModel"]


class LanguageModel(SupervisedOperator):
    """Predicts each token of a sequence from those before it.

    The loss of a token y that the model gives the scores z is ``-log softmax(z)[y]``, in nats;
    their mean over tokens is the cross-entropy. The perplexity is its exponential (Jelinek et al.
    1977): exp of the mean over all tokens of all batches and workers, not a mean of
    exponentials.

    ==============================  ==========  ================================================
    key                             default     meaning
    ==============================  ==========  ================================================
    ``vocab_size``                  None        number of tokens; needed without a ``model``
    ``sequence_length``             128         tokens that the model sees at a time, where data
                                                are given as one long tensor of tokens
    ``hidden_size``                 128         of the Transformer that is trained without a
                                                ``model``: numbers a token
    ``num_layers``                  2           of it
    ``num_heads``                   4           of it; divides ``hidden_size``
    ``dropout``                     0.0         of it, from 0 to below 1
    ``tie_weights``                 True        whether its embedding and output share a matrix
    ``ignore_index``                -100        targets that do not count: padding
    ==============================  ==========  ================================================

    and the keys of :class:`SupervisedOperator`. A ``model`` of your own gives scores (batch,
    length, tokens), or an object that has them as ``logits``, as transformers models do. Weights
    that it ties itself stay tied.

    Data are one long tensor of tokens, of which :class:`TokenWindows` makes sequences, or batches
    ``(tokens,)``, in which each token is the target of those before it, or ``(tokens, targets)``,
    all of them ints (batch, length).

    Metrics: ``train_loss`` and ``val_loss``, nats a token; ``train_perplexity`` and
    ``val_perplexity``; ``val_accuracy``, the share of tokens that were given the highest score.
    """

    OPTIONS: ClassVar[Mapping[str, Option]] = {
        **SupervisedOperator.OPTIONS,
        "vocab_size": integer(None, 1),
        "sequence_length": integer(128, 1),
        "hidden_size": integer(128, 1),
        "num_layers": integer(2, 1),
        "num_heads": integer(4, 1),
        "dropout": any_of(0.0, number(0.0, 0.0, 0.999).fits, "a number from 0 to below 1"),
        "tie_weights": flag(True),
        "ignore_index": integer(-100),
    }

    def check_options(self) -> None:
        """Check that heads share the hidden size."""
        super().check_options()
        size, heads = self.options["hidden_size"], self.options["num_heads"]
        if self.options["model"] is None and size % heads:
            raise ValueError(
                f"{type(self).__name__}: config['num_heads']={heads} must divide "
                f"config['hidden_size']={size}."
            )

    def build_model(self, config: dict[str, Any]) -> torch.nn.Module:
        """Return the model; a :class:`CausalTransformer` if none is given."""
        if self.options["model"] is not None:
            return super().build_model(config)
        if self.options["vocab_size"] is None:
            raise ValueError(
                f"{type(self).__name__}: config['vocab_size'] is missing; without a "
                "config['model'] it must be the number of tokens."
            )
        names = ("hidden_size", "num_layers", "num_heads", "dropout", "tie_weights")
        return CausalTransformer(
            self.options["vocab_size"],
            self.options["sequence_length"],
            **{name: self.options[name] for name in names},
        )

    def as_dataset(self, data: Any) -> Any:
        """Return sequences of one long tensor of tokens, other data as they are."""
        if isinstance(data, torch.Tensor) and data.dim() == 1:
            length, ignored = self.options["sequence_length"], self.options["ignore_index"]
            vocab_size = self.options["vocab_size"]
            if vocab_size is not None and len(data) and data.max() >= vocab_size:
                raise ValueError(
                    f"{type(self).__name__}: the text has the token {int(data.max())}, and with "
                    f"config['vocab_size']={vocab_size} tokens go up to {vocab_size - 1}."
                )
            return TokenWindows(data, length, ignored)
        return super().as_dataset(data)

    def predict(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Return scores (batch, length, tokens) and targets (batch, length)."""
        tokens, target = _tokens_and_targets(batch)
        output = self.model(tokens.long())
        return getattr(output, "logits", output), target.long()

    def losses(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Return the cross-entropy of each token."""
        return functional.cross_entropy(
            output.flatten(0, 1),
            target.flatten(),
            ignore_index=self.options["ignore_index"],
            reduction="none",
        )

    def num_items(self, batch: Any) -> torch.Tensor:
        """Return how many tokens count."""
        _, target = _tokens_and_targets(batch)
        counts: torch.Tensor = target.long() != self.options["ignore_index"]
        return counts.sum()

    def loss_metrics(self, total: torch.Tensor, count: float | torch.Tensor) -> dict[str, Any]:
        """Return loss and perplexity."""
        found = super().loss_metrics(total, count)
        return {**found, "perplexity": Sums(_perplexity, total=total, weight=count)}

    def metrics(self, output: torch.Tensor, target: torch.Tensor) -> dict[str, Any]:
        """Return the accuracy."""
        counts = target != self.options["ignore_index"]
        hits = ((output.argmax(dim=-1) == target) & counts).sum()
        return {"accuracy": Sums(ratio, total=hits, weight=counts.sum())}

    def generate(
        self,
        tokens: Sequence[int],
        num_tokens: int,
        temperature: float = 1.0,
        seed: int | None = None,
    ) -> list[int]:
        """Continue a text, drawing each token from what the model predicts. Runs on a worker.

        Args:
            tokens: the beginning, of one token at least.
            num_tokens: how many to add.
            temperature: divides the scores; 0 takes the highest one each time.
            seed: of the draws; None for torch's random numbers.

        Returns:
            The added tokens.
        """
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        model, text = self.unwrapped(self.model), list(tokens)
        was_training = model.training
        model.eval()
        try:
            with torch.no_grad():
                for _ in range(num_tokens):
                    seen = torch.tensor([text[-self.options["sequence_length"] :]]).to(self.device)
                    with self.autocast():
                        output = model(seen)
                    scores = in_full_precision(getattr(output, "logits", output)[0, -1]).cpu()
                    if temperature == 0:
                        text.append(int(scores.argmax()))
                        continue
                    chances = torch.softmax(scores / temperature, dim=0)
                    text.append(int(torch.multinomial(chances, 1, generator=generator)))
        finally:
            model.train(was_training)
        return text[len(tokens) :]


def _tokens_and_targets(batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    if isinstance(batch, torch.Tensor):
        batch = (batch,)
    tokens, target = batch if len(batch) == 2 else (batch[0][:, :-1], batch[0][:, 1:])
    return tokens, target


def _perplexity(total: float, weight: float) -> float:
    mean = ratio(total, weight)
    return math.inf if mean > 700 else math.exp(mean)  # exp(710) is no float any more
