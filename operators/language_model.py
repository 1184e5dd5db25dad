"""Next-token prediction."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import Dataset

from raysgd.metrics import Sums, ratio
from raysgd.operators.options import Option, any_of, choice, integer, number
from raysgd.operators.supervised import SupervisedOperator, evaluating, in_full_precision


class LanguageModel(SupervisedOperator):
    """Predicts each token of a sequence from the tokens before it.

    For scores z, the loss of a token y is ``-log softmax(z)[y]``, in nats. The mean over tokens
    is the cross-entropy. The perplexity is its exponential (Jelinek et al. 1977). raysgd computes
    the perplexity from the mean over all tokens of all batches and workers.

    ==============================  ==========  ================================================
    key                             default     meaning
    ==============================  ==========  ================================================
    ``vocab_size``                  None        number of tokens; needed without a ``model``
    ``sequence_length``             128         tokens per sequence, if data are one long tensor of
                                                tokens
    ``hidden_size``                 128         numbers per token in the Transformer that is
                                                trained without a ``model``
    ``num_layers``                  2           blocks of the Transformer
    ``num_heads``                   4           attention heads; must divide ``hidden_size``
    ``dropout``                     0.0         dropout of the Transformer, from 0 to below 1
    ``tie_weights``                 True        whether embedding and output share a matrix
    ``ignore_index``                -100        target of padding, which does not count
    ==============================  ==========  ================================================

    It also has the keys of :class:`SupervisedOperator`. Your own ``model`` returns scores (batch,
    length, tokens), or an object with ``logits``, like transformers models. Weights that the model
    ties stay tied.

    Data can be one long tensor of tokens, which :class:`TokenWindows` cuts into sequences.
    Otherwise batches are ``(tokens,)``, whose targets are the next tokens, or ``(tokens,
    targets)``. Tokens and targets are ints (batch, length).

    Metrics: ``train_loss`` and ``val_loss``, nats per token; ``train_perplexity`` and
    ``val_perplexity``; ``val_accuracy``, the fraction of targets with the highest score.
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
                f"{type(self).__name__}: config['vocab_size'] is missing. Pass the number of "
                "tokens, or config['model']."
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
        """Continue a text of at least one token, and return the added tokens. Call it on a worker.

        Args:
            tokens: Beginning of the text.
            num_tokens: Number of tokens to add.
            temperature: Divisor of the scores. 0 always picks the highest score.
            seed: Seed of the draws. None uses PyTorch's global generator.
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


class TokenWindows(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Cuts a text, a one-dimensional tensor, into sequences of `length` tokens.

    Samples are ``(tokens, targets)``. Each token except the first is a target once. The last
    sequence is padded with targets that do not count.

    >>> [sample[1].tolist() for sample in TokenWindows(torch.arange(6), length=3)]
    [[1, 2, 3], [4, 5, -100]]
    """

    def __init__(self, tokens: torch.Tensor, length: int, ignore_index: int = -100) -> None:
        if tokens.is_floating_point() or len(tokens) < 2:
            raise ValueError(
                f"TokenWindows needs at least two tokens, as ints, but got {len(tokens)} tokens of "
                f"{tokens.dtype}."
            )
        self.tokens = tokens
        self.length = length
        self.ignore_index = ignore_index

    def __len__(self) -> int:
        return -(-(len(self.tokens) - 1) // self.length)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        start = index * self.length
        window = self.tokens[start : start + self.length + 1].long()
        missing = self.length + 1 - len(window)
        return (
            functional.pad(window[:-1], (0, missing)),
            functional.pad(window[1:], (0, missing), value=self.ignore_index),
        )


class CausalTransformer(nn.Module):
    """A decoder-only Transformer for sequences of at most `max_length` tokens.

    The blocks follow Vaswani et al. 2017 (arXiv:1706.03762). Layer normalization precedes each
    sublayer, and positions are learned, as in GPT-2 (Radford et al. 2019). With tied weights, the
    embedding matrix also scores the tokens (Press and Wolf 2017, arXiv:1608.05859).
    """

    def __init__(
        self,
        vocab_size: int,
        max_length: int,
        hidden_size: int,
        num_layers: int,
        num_heads: int,
        dropout: float,
        tie_weights: bool,
    ) -> None:
        super().__init__()
        self.max_length = max_length
        self.tokens = nn.Embedding(vocab_size, hidden_size)
        self.positions = nn.Embedding(max_length, hidden_size)
        self.blocks = nn.ModuleList(
            _Block(hidden_size, num_heads, dropout) for _ in range(num_layers)
        )
        self.norm = nn.LayerNorm(hidden_size)
        self.scores = nn.Linear(hidden_size, vocab_size, bias=False)
        for embedding in (self.tokens, self.positions, self.scores):
            nn.init.normal_(embedding.weight, std=0.02)
        if tie_weights:
            self.scores.weight = self.tokens.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the scores (batch, length, vocab_size) of the token after each position."""
        if tokens.shape[1] > self.max_length:
            raise ValueError(
                f"A sequence has {tokens.shape[1]} tokens, but the model takes at most "
                f"{self.max_length}: config['sequence_length']."
            )
        places = torch.arange(tokens.shape[1], device=tokens.device)
        hidden = self.tokens(tokens) + self.positions(places)
        for block in self.blocks:
            hidden = block(hidden)
        scores: torch.Tensor = self.scores(self.norm(hidden))
        return scores


class _Block(nn.Module):
    def __init__(self, size: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm_attention, self.norm_feed = nn.LayerNorm(size), nn.LayerNorm(size)
        self.attend, self.mix = nn.Linear(size, 3 * size), nn.Linear(size, size)
        self.feed = nn.Sequential(nn.Linear(size, 4 * size), nn.GELU(), nn.Linear(4 * size, size))
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        batch, length, size = hidden.shape
        split = (batch, length, 3, self.num_heads, size // self.num_heads)
        parts = self.attend(self.norm_attention(hidden)).reshape(split)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.dropout(self.mix(seen.transpose(1, 2).reshape(hidden.shape)))
        result: torch.Tensor = hidden + self.dropout(self.feed(self.norm_feed(hidden)))
        return result
