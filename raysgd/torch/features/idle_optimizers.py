"""Warn of optimizers that have made no update in an epoch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from raysgd.loop.feature import StepFeature

if TYPE_CHECKING:
    from raysgd.torch.registration import TorchRegistration

__all__ = ["IdleOptimizers"]


class IdleOptimizers(StepFeature):
    """Looks at the optimizers when the first epoch ends."""

    def __init__(self, registration: TorchRegistration) -> None:
        self._registration = registration
        self._is_first = True

    def end_epoch(self, epoch: int) -> None:
        if self._is_first and (idle := self._registration.optimization.idle()):
            self._registration.say(
                "idle",
                "An epoch is over, and %s of those registered made no update: nobody has stepped "
                "it, or no loss has given it gradients. Call self.backward(loss) and "
                "self.optimizer_step(optimizer) in train_batch.",
                " and ".join(idle),
            )
        self._is_first = False
