"""Next-token prediction."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch.nn import functional

from raysgd.metrics import Sums, ratio
from raysgd.operators.causal_transformer import CausalTransformer
from raysgd.operators.options import Option, any_of, choice, integer, number
from raysgd.operators.supervised import SupervisedOperator, evaluating, in_full_precision
from raysgd.operators.token_windows import TokenWindows

__all__ = ["LanguageModel"]


class LanguageModel(SupervisedOperator):
    """Predicts each token of a sequence from the tokens before it.

    The loss of a token y with the scores z is ``-log softmax(z)[y]``, in nats. The mean over tokens
    is the cross-entropy. The perplexity is its exponential (Jelinek et al. 1977). raysgd computes
    it from the mean over all tokens of all batches and workers, and does not average exponentials.

    ==============================  ==========  ================================================
    key                             default     meaning
    ==============================  ==========  ================================================
    ``vocab_size``                  None        number of tokens; needed without a ``model``
    ``sequence_length``             128         tokens per sequence, if data are one long tensor of
                                                tokens
    ``hidden_size``                 128         numbers per token in the Transformer that is
                                                trained without a ``model``
    ``num_layers``                  2           its number of blocks
    ``num_heads``                   4           its attention heads; divides ``hidden_size``
    ``dropout``                     0.0         its dropout, from 0 to below 1
    ``tie_weights``                 True        whether its embedding and output share a matrix
    ``ignore_index``                -100        target of padding, which does not count
    ==============================  ==========  ================================================

    It also has the keys of :class:`SupervisedOperator`. Your own ``model`` returns scores (batch,
    length, tokens), or an object with ``logits``, like transformers models. Weights that the model
    ties stay tied.

    Data can be one long tensor of tokens, which :class:`TokenWindows` cuts into sequences.
    Otherwise batches are ``(tokens,)``, whose targets are the next tokens, or ``(tokens,
    targets)``. All are ints (batch, length).

    Metrics: ``train_loss`` and ``val_loss``, nats per token; ``train_perplexity`` and
    ``val_perplexity``; ``val_accuracy``, the fraction of tokens with the highest score.
    """

    OPTIONS: ClassVar[Mapping[str, Option]] = {
        **SupervisedOperator.OPTIONS,
        "vocab_size": integer(None, 1),
        "sequence_length": integer(128, 1),
        "hidden_size": integer(128, 1),
        "num_layers": integer(2, 1),
        "num_heads": integer(4, 1),
        "dropout": any_of(0.0, number(0.0, 0.0, 0.999).fits, "a number from 0 to below 1"),
        "tie_weights": choice(True, True, False),
        "ignore_index": integer(-100),
    }

    def build_model(self, config: dict[str, Any]) -> torch.nn.Module:
        if self.options["model"] is not None:
            return super().build_model(config)
        if self.options["vocab_size"] is None:
            raise ValueError(
                f"{type(self).__name__}: config['vocab_size'] is missing. Give the number of "
                "tokens, or a config['model']."
            )
        names = ("hidden_size", "num_layers", "num_heads", "dropout", "tie_weights")
        return CausalTransformer(
            self.options["vocab_size"],
            self.options["sequence_length"],
            **{name: self.options[name] for name in names},
        )

    def as_dataset(self, data: Any) -> Any:
        """Cut one long tensor of tokens into sequences. Return other data unchanged."""
        if isinstance(data, torch.Tensor) and data.dim() == 1:
            return TokenWindows(data, self.options["sequence_length"], self.options["ignore_index"])
        return super().as_dataset(data)

    def predict(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Return scores (batch, length, tokens) and targets (batch, length)."""
        tokens, target = _tokens_and_targets(batch)
        output = self.model(tokens.long())
        return getattr(output, "logits", output), target.long()

    def losses(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(
            output.flatten(0, 1),
            target.flatten(),
            ignore_index=self.options["ignore_index"],
            reduction="none",
        )

    def num_items(self, batch: Any) -> torch.Tensor:
        _, target = _tokens_and_targets(batch)
        counts: torch.Tensor = target.long() != self.options["ignore_index"]
        return counts.sum()

    def loss_metrics(self, total: torch.Tensor, count: float | torch.Tensor) -> dict[str, Any]:
        found = super().loss_metrics(total, count)
        return {**found, "perplexity": Sums(_perplexity, total=total, weight=count)}

    def metrics(self, output: torch.Tensor, target: torch.Tensor) -> dict[str, Any]:
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
        """Continue a text with tokens that the model predicts. Call it on a worker.

        Args:
            tokens: Beginning of the text, at least one token.
            num_tokens: Number of tokens to add.
            temperature: Divisor of the scores. 0 always picks the highest score.
            seed: Seed of the draws. None uses PyTorch's global generator.

        Returns:
            The added tokens.
        """
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        model, text = self.unwrapped(self.model), list(tokens)
        with evaluating(model), self.autocast():
            for _ in range(num_tokens):
                seen = torch.tensor([text[-self.options["sequence_length"] :]]).to(self.device)
                output = model(seen)
                scores = in_full_precision(getattr(output, "logits", output)[0, -1]).cpu()
                if temperature == 0:
                    text.append(int(scores.argmax()))
                    continue
                chances = torch.softmax(scores / temperature, dim=0)
                text.append(int(torch.multinomial(chances, 1, generator=generator)))
        return text[len(tokens) :]


def _tokens_and_targets(batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    if isinstance(batch, torch.Tensor):
        batch = (batch,)
    tokens, target = batch if len(batch) == 2 else (batch[0][:, :-1], batch[0][:, 1:])
    return tokens, target


def _perplexity(total: float, weight: float) -> float:
    mean = ratio(total, weight)
    return math.inf if mean > 700 else math.exp(mean)  # exp(710) overflows
