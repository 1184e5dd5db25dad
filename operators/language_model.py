"""Next-token prediction."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import Dataset

from raysgd.metrics import Sums, ratio
from raysgd.operators.base import SupervisedOperator, evaluating
from raysgd.torch.precision import to_full_precision


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

    OPTIONS: ClassVar[Mapping[str, Any]] = {
        **SupervisedOperator.OPTIONS,
        "vocab_size": None,
        "sequence_length": 128,
        "hidden_size": 128,
        "num_layers": 2,
        "num_heads": 4,
        "dropout": 0.0,
        "ignore_index": -100,
    }

    def build_model(self, config: dict[str, Any]) -> torch.nn.Module:
        if self.options["model"] is not None:
            return super().build_model(config)
        if self.options["vocab_size"] is None:
            raise ValueError(
                f"{type(self).__name__}: config['vocab_size'] is missing. Pass the number of "
                "tokens, or config['model']."
            )
        names = ("sequence_length", "hidden_size", "num_layers", "num_heads", "dropout")
        return CausalTransformer(self.options["vocab_size"], *(self.options[n] for n in names))

    def make_loader(self, data: Any, *, shuffle: bool) -> Any:
        """Return a loader. It cuts one long tensor of tokens into sequences."""
        if isinstance(data, torch.Tensor) and data.dim() == 1:
            data = TokenWindows(data, self.options["sequence_length"], self.options["ignore_index"])
        return super().make_loader(data, shuffle=shuffle)

    def run_model(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Return scores (batch, length, tokens) and targets (batch, length)."""
        tokens, target = _tokens_and_targets(batch)
        output = self.model(tokens.long())
        return getattr(output, "logits", output), target.long()

    def compute_losses(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(
            output.flatten(0, 1),
            target.flatten(),
            ignore_index=self.options["ignore_index"],
            reduction="none",
        )

    def num_items(self, batch: Any) -> torch.Tensor:
        _, target = _tokens_and_targets(batch)
        return torch.sum(target.long() != self.options["ignore_index"])

    def compute_loss_metrics(
        self, total: torch.Tensor, count: float | torch.Tensor
    ) -> dict[str, Any]:
        metrics = super().compute_loss_metrics(total, count)
        return {**metrics, "perplexity": Sums(_perplexity, total=total, weight=count)}

    def compute_metrics(self, output: torch.Tensor, target: torch.Tensor) -> dict[str, Any]:
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
                scores = to_full_precision(getattr(output, "logits", output)[0, -1]).cpu()
                if temperature == 0:
                    text.append(int(scores.argmax()))
                    continue
                chances = torch.softmax(scores / temperature, dim=0)
                text.append(int(torch.multinomial(chances, 1, generator=generator)))
        return text[len(tokens) :]


def _tokens_and_targets(batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, *more = (batch,) if isinstance(batch, torch.Tensor) else batch
    return (tokens, more[0]) if len(more) == 1 else (tokens[:, :-1], tokens[:, 1:])


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
    sublayer, and positions are learned, as in GPT-2 (Radford et al. 2019). The embedding matrix
    also scores the tokens (Press and Wolf 2017, arXiv:1608.05859).
    """

    def __init__(
        self,
        vocab_size: int,
        max_length: int,
        hidden_size: int,
        num_layers: int,
        num_heads: int,
        dropout: float,
    ) -> None:
        super().__init__()
        self.max_length = max_length
        self.tokens = nn.Embedding(vocab_size, hidden_size)
        self.positions = nn.Embedding(max_length, hidden_size)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                hidden_size,
                num_heads,
                dim_feedforward=4 * hidden_size,
                dropout=dropout,
                activation=functional.silu,  # for GELU, PyTorch has a slow path with masks
                batch_first=True,
                norm_first=True,
            )
            for _ in range(num_layers)
        )
        self.norm = nn.LayerNorm(hidden_size)
        self.scores = nn.Linear(hidden_size, vocab_size, bias=False)
        for embedding in (self.tokens, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)
        self.scores.weight = self.tokens.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the scores (batch, length, vocab_size) of the token after each position."""
        length = tokens.shape[1]
        if length > self.max_length:
            raise ValueError(
                f"A sequence has {length} tokens, but the model takes at most {self.max_length}: "
                "config['sequence_length']."
            )
        hidden = self.tokens(tokens) + self.positions(torch.arange(length, device=tokens.device))
        mask = nn.Transformer.generate_square_subsequent_mask(length, tokens.device)
        for block in self.blocks:
            hidden = block(hidden, src_mask=mask, is_causal=True)
        scores: torch.Tensor = self.scores(self.norm(hidden))
        return scores
