"""Whether a batch may be trained in parts: what is seen of the code that trains it."""

from __future__ import annotations

from raysgd.data.shard import Place

__all__ = ["IndivisibleError", "Parts"]


class IndivisibleError(BaseException):
    """Raised within a part of a batch that has to be trained as a whole; the step is redone so.

    It passes through user code, which must not take it for an error.
    """


class Parts:
    """Remembers why batches must not come in parts.

    Parts make the update of a whole batch where all gradients come before the update, and both by
    the helpers. That is seen while batches are whole, or in the first part of one.
    """

    def __init__(self) -> None:
        self.why_not: str | None = None
        """None: they may."""

    def refuse(self, why: str, place: Place) -> None:
        """Note why they must not.

        Raises:
            IndivisibleError: if the batch under way has come in parts.
        """
        self.why_not = self.why_not or why
        if place.is_part:
            raise IndivisibleError(why)
