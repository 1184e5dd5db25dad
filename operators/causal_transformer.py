"""A small Transformer that predicts the next token."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

__all__ = ["CausalTransformer"]


class CausalTransformer(nn.Module):
    """A decoder-only Transformer.

    The blocks follow Vaswani et al. 2017 (arXiv:1706.03762). Layer normalization precedes each
    sublayer, and positions are learned, as in GPT-2 (Radford et al. 2019). With tied weights, the
    embedding matrix also scores the tokens (Press and Wolf 2017, arXiv:1608.05859).

    Args:
        vocab_size: Number of tokens.
        max_length: Maximum number of tokens in a sequence.
        hidden_size: Size of a token's vector, a multiple of `num_heads`.
        num_layers: Number of blocks.
        num_heads: Number of attention heads per block.
        dropout: Dropout probability after each sublayer.
        tie_weights: Whether embedding and output share their matrix.
    """

    def __init__(
        self,
        vocab_size: int,
        max_length: int,
        hidden_size: int = 128,
        num_layers: int = 2,
        num_heads: int = 4,
        dropout: float = 0.0,
        tie_weights: bool = True,
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
        """Return the scores (batch, length, vocab_size) of the token after each position.

        Raises:
            ValueError: If a sequence has more than `max_length` tokens.
        """
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
