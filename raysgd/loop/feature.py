"""The interface of the features of an update."""

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

from raysgd.loop.loss_weights import Factors
from raysgd.loop.update import Update

UPDATE_HOOKS = (
    "begin_update",
    "begin_micro_batch",
    "observe_loss",
    "before_optimizer_step",
    "before_commit",
    "commit",
)
"""Hooks of each update. Only the features that override one are called."""


class UpdateFeature:
    """The base class of training features. By default, each hook does nothing.

    A `TrainState` calls its features in order. `raysgd.loop.update` shows an update in detail:

    ===================  =======================================================================
    an update            `begin_update`, `begin_micro_batch`, `observe_loss` for each loss,
                         `before_optimizer_step`, `before_commit`, and `commit`; or `roll_back`
    a call of ``train``  `check_parameters`, `begin_call`, updates, `end_epoch`, `check_parameters`,
                         `end_call`, and `sync_buffers`
    a generation         `sync_initial_state` in the first, else `begin_generation` and `receive`
    a state              `before_export`, `state_dict`; `check_state`, `load_state_dict`
    ===================  =======================================================================

    All ranks call these hooks together, so they may communicate, and raise if a worker is lost:
    `sync_initial_state`, `begin_generation`, `receive`, `begin_call`, `begin_update`,
    `begin_micro_batch`, `before_optimizer_step`, `before_commit`, `sync_buffers`, `before_export`.
    `commit` may communicate too, but an error in it undoes nothing. The others must not: only some
    ranks may call `roll_back`.

    Only PyTorch calls `observe_loss`, `before_optimizer_step`, `receive`, and methods of states.
    Besides its own hooks and attributes, a feature may use:

    - The methods of the update. It may exchange held metrics, call `mark_bad` before an update that
      must not be applied, and begin and end steps in `optimizer_steps`.
      `LossWeights.set_total_items` is for exchanges that count.
    - The training state. It sets `is_damaged` if it cannot restore what has changed.
    - The buffers. It may write their copies back if an update is not applied, and take
      new copies after it has changed buffers.
    - The optimizers. It may register hooks of their steps, for what the updates themselves do.
    """

    why_optimizer_step: str = ""  # what requires ``optimizer_step`` instead of ``optimizer.step``
    counts_in_commit = False  # `before_commit` communicates, so an update counts only after it
    gathers_metrics = False  # `before_commit` gives each worker the held metrics of all workers
    needs_warm_up = False  # the first batch of a worker takes much longer than the others
    warning = ""  # what the newest generation has changed, for the driver to log

    # ---- the group of workers

    def sync_initial_state(self) -> None:
        """Copy the registered objects of rank 0 to all ranks. Every rank must call this."""

    def begin_generation(self) -> None:
        """Prepare for a generation that forms after ``setup``, and for its process group."""

    def receive(self, leader_rank: int) -> Callable[[], None]:
        """Receive state of the leader that the training state lacks. Every rank must call this.

        Return a function that loads the received state. Ranks that follow the leader call it when
        all state has arrived. Features of a placement with shards keep these here: all ranks, also
        the leader, get other shards, and release their old ones when each rank has its new ones.
        """
        return lambda: None

    def sync_buffers(self) -> None:
        """Make buffers equal on all ranks after a call."""

    # ---- calls and updates

    def begin_call(self, logs_steps: bool) -> None:
        """Prepare for a call of ``train``, which may log metrics of single steps."""

    def check_parameters(self) -> None:
        """Raise an error if user code trains parameters that the workers do not keep equal."""

    def end_call(self) -> None:
        """Handle the end of a call that has reached its goal, before `sync_buffers`."""

    def begin_update(self, update: Update) -> None:
        """Prepare for an update, before its first micro-batch."""

    def begin_micro_batch(self, update: Update) -> None:
        """Prepare for the next micro-batch of the update."""

    def observe_loss(self, update: Update, loss: Any, factors: Factors) -> None:
        """Read a loss before its gradients are computed, with these factors."""

    def before_optimizer_step(self, update: Update, optimizer: Any) -> None:
        """Read or change the gradients of an optimizer before its step."""

    def before_commit(self, update: Update) -> None:
        """Raise an error if the update must not be committed. Change nothing that it trained."""

    def commit(self, update: Update) -> None:
        """Keep the changes of an update. Its steps count even if this raises."""

    def roll_back(self, update: Update) -> None:
        """Restore what a discarded update changed. The loop also calls this without one."""

    def evaluating(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context for evaluating the models."""
        return contextlib.nullcontext()

    def after_user_function(self) -> None:
        """Handle the end of a function of ``apply_all_operators``."""

    def end_epoch(self, epoch: int) -> None:
        """Handle the end of an epoch, after which `epoch` epochs are complete."""

    # ---- state

    def before_export(self) -> None:
        """Handle a request for the state or the models of rank 0. All ranks call this together."""

    def state_dict(self) -> dict[str, Any]:
        """Return the entries that this feature adds to the training state."""
        return {}

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise CheckpointError if this feature cannot load its entries of a training state."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load this feature's entries of a training state, after the models and optimizers."""
