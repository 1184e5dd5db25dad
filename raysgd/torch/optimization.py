"""From losses to updates: scaling, accumulation and clipping."""

from __future__ import annotations

import functools
import inspect
import math
import numbers
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from raysgd.data.partition import MicroBatch
from raysgd.loop.feature import StepFeature
from raysgd.torch.precision import Precision
from raysgd.torch.tensors import multiply_all, version_of

if TYPE_CHECKING:
    from raysgd.torch.train_state import TorchTrainState

__all__ = ["Group", "Optimization", "as_count", "has_gradients"]

_CLOSURE = (
    "optimizer_step() cannot step {0}, because it needs a closure. Override train_batch, and call "
    "step(closure) of {0} there, in full precision, without accumulation or clipping."
)

_UNEVEN = (
    "The batches of an accumulation group have other numbers of samples than expected, and with "
    'register(sharding="full") the gradients so far are summed over the workers already. Use a '
    "loader that raysgd partitions, override num_items(batch), call backward(loss, "
    "num_samples=...), or do not accumulate."
)


class Group:
    """Weights the losses of the batches of a group, so that the losses add up to one mean.

    The weight of a batch is ``samples of the batch / samples of the group``. Before the last batch,
    `Group` assumes that all batches are like the first. If that is wrong, the last batch corrects
    the accumulated gradients. If the loader knows the samples of all workers, the weights are
    right from the beginning.

    If user code counts items, the last batch is divided by the mean of the workers' counts.

    >>> group = Group()
    >>> group.begin(MicroBatch(0, 2, is_last=False))
    >>> group.weigh(6)
    (1.0, 0.5)
    >>> group.begin(MicroBatch(1, 2))
    >>> group.weigh(2)  # 2 of 8 samples, and the first batch counts for 6 / 8, not for 1 / 2
    (1.5, 0.25)
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.place = MicroBatch()
        self._counts: bool | None = None
        self._taken_as = 0.0
        self._held = 0.0
        self.holds = False
        """Whether earlier batches had backward passes."""
        self._given = 0.0
        self._share = 1.0
        self._this: float | None = None
        self.samples: float | None = None
        """Samples of the current batch, if the loop has counted them."""

    def begin(self, place: MicroBatch) -> None:
        if place.position == 0:
            self.reset()
        self._held += self._this or 0.0
        self.holds = self.holds or self.has_backward
        self._this = self.samples = None
        self.place = place

    @property
    def is_last(self) -> bool:
        return self.place.is_last

    @property
    def has_backward(self) -> bool:
        return self._this is not None

    def weigh(
        self,
        num_samples: float | None,
        mean_over_workers: Callable[[float], float] = lambda count: count,
        sums_each_batch: bool = False,
    ) -> tuple[float, float]:
        """Return the factors for the accumulated gradients and for the current loss.

        Args:
            num_samples: items that user code counted; None for the samples of the batch.
            mean_over_workers: returns the mean of the workers' counts. The last batch of a group
                calls it if items are counted.
            sums_each_batch: whether the gradients are those of all workers, so that all workers
                must correct them by the same factor.

        Raises:
            ValueError: if other losses of the group have other counts.
        """
        given, place = self._checked(num_samples), self.place
        if self._this is not None:
            return 1.0, self._weight(self._this)
        self._given = given
        # Samples that another worker also has do not count.
        self._this = size = 0.0 if place.size == 0 else given
        self._share = place.share if num_samples is None else 1.0
        if self._held == 0:
            if sums_each_batch and num_samples is not None:
                self._taken_as = 1.0
            elif place.size and place.total:
                self._taken_as = size * place.total / place.size
            else:
                self._taken_as = place.planned * size
        correction = 1.0
        total = self._held + size
        if self.is_last and num_samples is not None:
            total = mean_over_workers(total)
        # Sizes of parts are fractions with rounding errors.
        if self.is_last and total and not math.isclose(total, self._taken_as, rel_tol=1e-12):
            correction, self._taken_as = self._taken_as / total, total
        return correction, self._weight(size)

    def _weight(self, size: float) -> float:
        return size / self._taken_as * self._share if size else 0.0

    def _checked(self, num_samples: float | None) -> float:
        if self._this is None:
            if self._counts is not None and self._counts != (num_samples is not None):
                raise ValueError(
                    "backward(num_samples=...) has a number for some batches of an accumulation "
                    "group only. Pass it for all of them or for none."
                )
            self._counts = num_samples is not None
        elif num_samples is not None and num_samples != self._given:
            raise ValueError(
                f"backward(num_samples={num_samples!r}) follows num_samples={self._given:g} for "
                "another loss of the same batch. Pass the same number."
            )
        if num_samples is None:
            return float(self.samples or self.place.size or 1)
        return num_samples


def as_count(given: Any, source: str = "backward(num_samples={})") -> float:
    """Return a number, or a tensor of one element, as a float. `source` is for errors."""
    is_scalar = isinstance(given, torch.Tensor) and given.numel() == 1
    value = given.item() if is_scalar else given
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{source.format(repr(given))}: must be a number.")
    if not 0 <= float(value) < math.inf:
        raise ValueError(f"{source.format(repr(value))}: must be at least 0 and finite.")
    return float(value)


class Optimization(StepFeature):
    """Computes the updates of one operator.

    Batches come in groups of ``accumulation_steps``, and large ones in parts. The last batch of a
    group makes the update. Without the iterator of the loop, each batch is a group.
    """

    def __init__(self, state: TorchTrainState, precision: Precision) -> None:
        self._state = state
        self.precision = precision
        self._step = state.step
        self.group = Group()
        self._aside: dict[torch.nn.Parameter, torch.Tensor] = {}
        # Accumulated gradients that are back in the parameters, until their optimizer steps.
        self._returned: dict[torch.nn.Parameter, torch.Tensor] = {}
        self._versions: dict[torch.nn.Parameter, int] = {}
        self._asked: set[int] = set()
        self._seen: dict[int, list[tuple[int, int]]] = {}
        self._in_group = False
        self.in_helper = False
        """Whether `step` is running."""
        self._has_stepped = False
        self._used = False
        self._checks_steps = False
        self._gradients: tuple[Any, torch.Tensor] | None = None
        self.rows: Callable[[Any], Any] = lambda parameters: parameters
        """Returns the tensors that have this worker's gradients of some parameters."""
        self.whole_norm: Callable[[torch.Tensor], torch.Tensor] = lambda norm: norm
        """Returns the norm of all workers' gradients from that of this worker's."""
        self.sums_each_batch = False
        """Whether workers sum the gradients of each batch, also within a group."""
        self.mean_over_workers = state.mean_over_workers

    @property
    def _optimizers(self) -> list[torch.optim.Optimizer]:
        return self._state.optimizers

    def begin(self) -> None:
        """Register optimizer hooks.

        Call this after registering the hooks that may reject a step.
        """
        if (steps := self._state.accumulation_steps) > 1:
            self.needs_helper = f"gradient_accumulation_steps={steps}"
        may_come_in_parts = (self._state.settings.full_size or 1) > 1
        self._checks_steps = self.precision.scales or may_come_in_parts
        self._checks_steps |= any(feature.needs_helper for feature in self._state.features)
        for optimizer in self._optimizers:
            optimizer.register_step_pre_hook(self._begin_update)

    # ---- batches

    def begin_batch(self, place: MicroBatch) -> None:
        self._checks_steps = self._checks_steps or place.is_part
        self._has_stepped = False
        if (
            place.position > 0
            and place.is_part
            and not self._used
            and any(map(has_gradients, self._optimizers))
        ):
            self._refuse_parts("train_batch does not call self.backward(loss)")
        self.group.begin(place)
        if self._state.accumulation_steps == 1 and not place.is_part:
            return
        self._in_group = True
        self._asked.clear()
        self._seen.clear()
        if self.group.holds:
            for optimizer in self._optimizers:
                self._set_aside(optimizer)

    def _begin_update(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._step.check_warm_up()
        if self._checks_steps:
            self._check_step(optimizer)
        self._step.begin_update(optimizer)

    def check_complete(self) -> None:
        """Raise RuntimeError if accumulated gradients are left at the end of a group."""
        if self.group.holds and not self._has_updated():
            self._refuse_parts("train_batch makes no update in some batches")
            raise RuntimeError(
                "train_batch made no update in the last batch of an accumulation group. Call "
                "self.backward(loss) and self.optimizer_step(optimizer) for every batch."
            )

    def _has_updated(self) -> bool:
        return any(map(self._step.num_updates, self._optimizers))

    def before_commit(self) -> None:
        self.check_complete()
        if self.group.place.share != 1.0 and not self._used and self._has_updated():
            self._warn_of_weight()
        if self._used and len(self._optimizers) > 1 and self._has_updated():
            # A loss may leave gradients in parameters of another optimizer. If no optimizer
            # stepped, the loop accumulates by itself.
            self._zero_gradients()

    def _warn_of_weight(self) -> None:
        if self._state.settings.options.elastic.shares != "even":
            self._state.say(
                "weight",
                "ElasticConfig(shares=...): train_batch does not call self.backward(loss), so the "
                "losses of workers with different shares have equal weight. Call it instead of "
                "loss.backward().",
            )

    def commit(self) -> None:
        self._reset()

    def roll_back(self) -> None:
        self._zero_gradients()
        self._reset()

    def _reset(self) -> None:
        self._asked.clear()
        self._aside.clear()
        self._returned.clear()
        self._seen.clear()
        self._used = self._in_group = False
        self.group.reset()

    def _zero_gradients(self) -> None:
        for optimizer in self._optimizers:
            optimizer.zero_grad(set_to_none=True)

    # ---- within a batch

    def backward(self, loss: torch.Tensor, num_samples: float | torch.Tensor | None) -> None:
        """See :meth:`TrainingOperator.backward`."""
        count = None if num_samples is None else as_count(num_samples)
        if self._has_stepped:
            self._refuse_parts("train_batch computes gradients after it has stepped an optimizer")
        if self._in_group:
            for optimizer in self._optimizers:
                self._check_unchanged(optimizer)
            self._put_back()
            weigh, mean = self.group.weigh, self.mean_over_workers
            correction, weight = weigh(count, mean, self.sums_each_batch)
        elif count is None:
            correction, weight = 1.0, self.group.place.share
        else:  # several losses of a batch may have different counts
            counted = 0.0 if self.group.place.size == 0 else count
            mean_count = self.mean_over_workers(counted)
            correction, weight = 1.0, counted / mean_count if counted else 0.0
        if correction != 1.0:
            if self.sums_each_batch and count is None:
                self._refuse_parts("a batch has another number of samples than was planned")
                raise RuntimeError(_UNEVEN)
            self._multiply_gradients(correction)
        if count == 0 and not loss.detach().isfinite().all():
            _zero_gradients_of(loss)  # 0 * NaN would be NaN
        self._used = True
        self.precision.backward(loss if weight == 1.0 else loss * weight, self.group.is_last)
        self._versions = {p: version_of(p.grad) for p in self._returned if p.grad is not None}
        if self.group.place.is_part and not self.group.is_last:
            self._seen = {id(optimizer): _gradients_of(optimizer) for optimizer in self._optimizers}

    def step(self, optimizer: torch.optim.Optimizer) -> bool:
        """See :meth:`TrainingOperator.optimizer_step`."""
        if _needs_closure(type(optimizer).step):
            raise TypeError(_CLOSURE.format(type(optimizer).__name__))
        self._step.check_warm_up()
        self._has_stepped = True
        if self._in_group:
            self._check_asked_once(optimizer)
            self._check_unchanged(optimizer)
        elif self._step.num_updates(optimizer):
            self._refuse_parts("train_batch steps an optimizer twice")
        if self._in_group and not self.group.has_backward and has_gradients(optimizer):
            self._refuse_parts("train_batch does not call self.backward(loss)")
            raise RuntimeError(
                "optimizer_step() found gradients that self.backward(loss) did not compute. Call "
                "self.backward(loss) instead of loss.backward()."
            )
        if not self.group.is_last:
            self._set_aside(optimizer)
            return False
        if self.group.holds and not self.group.has_backward:
            self._refuse_parts("train_batch does not call self.backward(loss) for some batches")
            raise RuntimeError(
                "optimizer_step() in the last batch of an accumulation group needs "
                "self.backward(loss) for this batch. Call it for every batch."
            )
        self.in_helper, self._gradients = True, None
        try:
            for feature in self._state.features:
                feature.before_update(optimizer)
            before = self._step.num_updates(optimizer)
            self.precision.step(optimizer)
        finally:
            self.in_helper, self._gradients = False, None
        if self._step.num_updates(optimizer) == before:  # an overflow made the precision skip it
            self.end_update(optimizer)
        optimizer.zero_grad(set_to_none=True)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                self._returned.pop(parameter, None)
        return True

    def gradients(self, optimizer: torch.optim.Optimizer) -> tuple[Any, torch.Tensor]:
        """Return the tensors that have the unscaled gradients of an optimizer, and their norm.

        The tensors are those of this worker. The norm is that of all workers before clipping.
        """
        if self._gradients is None:
            self.precision.unscale(optimizer)
            held = self.rows(self.precision.parameters(optimizer))
            norm = torch.nn.utils.get_total_norm([p.grad for p in held if p.grad is not None])
            self._gradients = held, self.whole_norm(norm)
        return self._gradients

    def _refuse_parts(self, why: str) -> None:
        self._state.parts.refuse(why, self.group.place)

    def _multiply_gradients(self, factor: float) -> None:
        of_models = (p for model in self._state.models for p in model.parameters())
        stepped = (p for o in self._optimizers for g in o.param_groups for p in g["params"])
        gradients = [*self._returned.values(), *(p.grad for p in (*of_models, *stepped))]
        held = {id(gradient): gradient for gradient in gradients if gradient is not None}
        multiply_all(held.values(), factor)

    def _set_aside(self, optimizer: torch.optim.Optimizer) -> None:
        """Set the gradients of an optimizer aside until the backward pass of the next batch.

        Neither other losses of the same batch nor ``zero_grad`` may change them.
        """
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                returned = self._returned.pop(parameter, None)
                gradient = returned if parameter.grad is None else parameter.grad
                if gradient is not None:
                    self._aside.setdefault(parameter, gradient)
                    parameter.grad = None

    def _put_back(self) -> None:
        """Restore the gradients of earlier batches, also after a ``zero_grad`` between losses.

        With several optimizers they are copies, because ``zero_grad`` must discard gradients that a
        loss added to the parameters of another optimizer.
        """
        is_first, are_several = not self.group.has_backward, len(self._optimizers) > 1
        if is_first:
            self._returned, self._aside = self._aside, {}
        for parameter, gradient in self._returned.items():
            if is_first or (are_several and parameter.grad is None):
                parameter.grad = gradient.clone() if are_several else gradient
            elif parameter.grad is None or version_of(parameter.grad) != self._versions[parameter]:
                raise RuntimeError(
                    "Accumulated gradients were changed between two losses of a batch. Call "
                    "zero_grad() before the first self.backward(loss) of the batch, or leave it "
                    "out."
                )

    # ---- checks

    def end_update(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if any(optimizer is registered for registered in self._optimizers):
            self._step.end_update(optimizer)
            for feature in self._state.features:
                feature.after_update(optimizer)

    def _check_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Reject a step by user code that skips what `step` does."""
        if self.in_helper:
            return
        if self._step.is_open:
            self._refuse_parts(
                "train_batch steps an optimizer itself, not by self.optimizer_step()"
            )
        features = self._state.features
        why = next((each.needs_helper for each in features if each.needs_helper), "")
        if not why and self._used and self.precision.scales:
            why = f"the scaled gradients of self.backward(loss) under {self.precision.name}"
        if not why:
            return
        raise RuntimeError(
            f"{type(optimizer).__name__}.step() ignores {why}. Call self.backward(loss) and "
            "self.optimizer_step(optimizer) in train_batch instead."
        )

    def _check_unchanged(self, optimizer: torch.optim.Optimizer) -> None:
        """Reject parts if user code changes the gradients of a part, for example by clipping."""
        seen = self._seen.get(id(optimizer))
        if seen is not None and seen != _gradients_of(optimizer):
            self._refuse_parts("train_batch changes gradients before it steps an optimizer")

    def _check_asked_once(self, optimizer: torch.optim.Optimizer) -> None:
        if id(optimizer) in self._asked:
            self._refuse_parts("train_batch steps an optimizer twice")
            raise RuntimeError(
                f"optimizer_step() was called twice in one batch for the same "
                f"{type(optimizer).__name__}. With {self.needs_helper} it can step once per batch."
            )
        self._asked.add(id(optimizer))


def _zero_gradients_of(loss: torch.Tensor) -> None:
    """Make the backward pass of a loss that is not finite, such as a mean of no items, give zeros.

    The pass must run, because the workers average gradients in it. Gradients from other workers by
    collectives in the forward pass are lost. A finite loss, such as ``0 * output.sum()``, keeps
    them.
    """

    def zeros(gradients: Sequence[Any], _: Any) -> tuple[Any, ...]:
        return tuple(None if each is None else torch.zeros_like(each) for each in gradients)

    nodes, seen = [loss.grad_fn], set()
    while nodes:
        node = nodes.pop()
        # Nodes of parameters outlive this pass, with their hooks.
        if node is None or node in seen or hasattr(node, "variable"):
            continue
        seen.add(node)
        node.register_hook(zeros)
        nodes += [parent for parent, _ in node.next_functions]


def has_gradients(optimizer: torch.optim.Optimizer) -> bool:
    return any(p.grad is not None for group in optimizer.param_groups for p in group["params"])


def _gradients_of(optimizer: torch.optim.Optimizer) -> list[tuple[int, int]]:
    """Return the identities and versions of gradients, to detect changes."""
    gradients = [p.grad for group in optimizer.param_groups for p in group["params"]]
    return [(id(each), 0 if each is None else version_of(each)) for each in gradients]


@functools.cache
def _needs_closure(step: Callable[..., Any]) -> bool:
    closure = inspect.signature(step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty
