"""Warn of optimizers that have made no update in an epoch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from raysgd.loop.feature import StepFeature

if TYPE_CHECKING:
    from raysgd.torch.train_state import TorchTrainState

__all__ = ["IdleOptimizers"]


class IdleOptimizers(StepFeature):
    """Looks at the optimizers when the first epoch ends."""

    def __init__(self, state: TorchTrainState) -> None:
        self._state = state
        self._with_gradients: set[int] = set()
        self._has_committed = False
        self._is_first = True

    def before_update(self, optimizer: Any) -> None:
        """Look for gradients, which a sharded optimizer drops in its step."""
        if id(optimizer) not in self._with_gradients and any(
            p.grad is not None for group in optimizer.param_groups for p in group["params"]
        ):
            self._with_gradients.add(id(optimizer))

    after_update = before_update

    def commit(self) -> None:
        self._has_committed = True

    def idle(self) -> list[str]:
        """Name the optimizers that have never made an update although batches were trained."""
        if not self._has_committed:
            return []  # batches of a loop's own
        return [
            f"optimizers[{index}] ({type(optimizer).__name__})"
            for index, optimizer in enumerate(self._state.optimizers)
            # one that zeroes its gradients as it steps has a state, most likely
            if id(optimizer) not in self._with_gradients
            and not optimizer.state
            and any(p.requires_grad for group in optimizer.param_groups for p in group["params"])
        ]

    def end_epoch(self, epoch: int) -> None:
        if self._is_first and (idle := self.idle()):
            self._state.say(
                "idle",
                "An epoch is over, and %s of those registered made no update: nobody has stepped "
                "it, or no loss has given it gradients. Call self.backward(loss) and "
                "self.optimizer_step(optimizer) in train_batch.",
                " and ".join(idle),
            )
        self._is_first = False
