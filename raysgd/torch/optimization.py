"""From losses to updates: scaling, accumulation and clipping."""

from __future__ import annotations

import functools
import math
import numbers
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from raysgd._internal.step_timing import OPTIMIZER, OTHER
from raysgd.data.partition import MicroBatch
from raysgd.loop.feature import StepFeature
from raysgd.torch import ddp
from raysgd.torch.precision import Precision
from raysgd.torch.register_checks import required_arguments
from raysgd.torch.state import multiply_all, version_of

if TYPE_CHECKING:
    from raysgd.torch.train_state import TorchTrainState

_NO_BACKWARD = "train_batch does not call self.backward(loss) for every batch"


class Group:
    """Weights the losses of the batches of a group, so that the losses add up to one mean.

    The weight of a batch is ``samples of the batch / samples of the group``. `Group` expects all
    batches to be as large as the first, unless the loader knows all sizes. If the group turns out
    to have another number of samples, the last batch corrects the accumulated gradients. If user
    code counts items, the number is the mean of the workers' counts.

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
        self.holds = False
        """Whether earlier batches had backward passes."""
        self.samples: float | None = None
        """Samples of the current batch, if the loop has counted them."""
        self.is_sum = False
        """Whether the loss of the current batch is a sum over its samples, and not a mean."""
        self._counts: bool | None = None
        self._expected = 0.0
        self._held = 0.0
        self._given = 0.0
        self._share = 1.0
        self._this: float | None = None

    def begin(self, place: MicroBatch) -> None:
        if place.position == 0:
            self.reset()
        self._held += self._this or 0.0
        self.holds = self.holds or self.has_backward
        self._this = self.samples = None
        self.is_sum = False
        self.place = place

    @property
    def is_last(self) -> bool:
        return self.place.is_last

    @property
    def has_backward(self) -> bool:
        return self._this is not None

    def mean(self, loss: torch.Tensor) -> torch.Tensor:
        return loss / (self.samples or 1) if self.is_sum else loss

    def weigh(
        self,
        num_samples: float | None,
        mean_over_workers: Callable[[float], float] = lambda count: count,
        sums_each_batch: bool = False,
    ) -> tuple[float, float]:
        """Return the factors for the accumulated gradients and for the current loss.

        `num_samples` is a number of items that user code counted. If `sums_each_batch`, gradients
        are sums over all workers, so all workers must correct the gradients by the same factor.

        Raises:
            ValueError: If another loss of the batch has another count, or if user code counts items
                only for some batches of the group.
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
                self._expected = 1.0
            elif place.size and place.total:
                self._expected = size * place.total / place.size
            else:
                self._expected = place.planned * size
        correction = 1.0
        total = self._held + size
        if self.is_last and num_samples is not None:
            total = mean_over_workers(total)
        # Sizes of parts are fractions with rounding errors.
        if self.is_last and total and not math.isclose(total, self._expected, rel_tol=1e-12):
            correction, self._expected = self._expected / total, total
        return correction, self._weight(size)

    def _weight(self, size: float) -> float:
        return size / self._expected * self._share if size else 0.0

    def _checked(self, num_samples: float | None) -> float:
        if self._this is None:
            if self._counts is not None and self._counts != (num_samples is not None):
                raise ValueError(
                    "backward(num_samples=...) was passed for some batches of an accumulation "
                    "group. Pass it for all of them or for none."
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
        raise TypeError(f"{source.format(repr(given))}: the count must be a number.")
    if not 0 <= float(value) < math.inf:
        raise ValueError(f"{source.format(repr(value))}: the count must be finite and at least 0.")
    return float(value)


class Optimization(StepFeature):
    """Computes the updates of one operator.

    Batches come in groups of ``accumulation_steps``, and large batches in parts. The last batch of
    a group makes the update. If a loop does not use its iterator, each batch is a group.
    """

    def __init__(self, state: TorchTrainState, precision: Precision) -> None:
        self._state = state
        self.precision = precision
        self._step = state.step
        self.group = Group()
        self._aside: dict[torch.nn.Parameter, torch.Tensor] = {}
        # Accumulated gradients that are back in the parameters, until their optimizer steps.
        self._returned: dict[torch.nn.Parameter, torch.Tensor] = {}
        self._stepped: set[int] = set()
        self._seen: dict[int, list[tuple[int, int]]] = {}
        self._in_group = False
        self.in_helper = False
        """Whether `step` is running."""
        self._used = False
        self.average: Callable[[torch.optim.Optimizer], None] = lambda optimizer: None
        """Averages gradients of an optimizer that the workers have not averaged."""
        self.rows: Callable[[Any], Any] = lambda parameters: parameters
        """Returns the tensors that have this worker's gradients of some parameters."""
        self.whole_norm: Callable[[torch.Tensor], torch.Tensor] = lambda norm: norm
        """Returns the norm of all workers' gradients, given the norm of this worker's gradients."""
        self.sums_each_batch = False
        """Whether workers sum the gradients of each batch, also within a group."""
        self.mean_over_workers = state.mean_over_workers

    @property
    def needs_warm_up(self) -> bool:  # type: ignore[override]
        state = self._state
        if any(feature.is_fully_sharded for feature in state.sharded):
            return False
        return state.settings.device.type == "cuda" or any(map(ddp.is_compiled, state.models))

    @property
    def _optimizers(self) -> list[torch.optim.Optimizer]:
        return self._state.optimizers

    def begin(self) -> None:
        """Register optimizer hooks, after the hooks that may reject a step."""
        if (steps := self._state.accumulation_steps) > 1:
            self.needs_helper = f"gradient_accumulation_steps={steps}"
        for optimizer in self._optimizers:
            optimizer.register_step_pre_hook(self._begin_update)
            for inner in vars(optimizer).values():  # as in sharpness-aware minimization
                if isinstance(inner, torch.optim.Optimizer) and inner not in self._optimizers:
                    inner.register_step_pre_hook(lambda inner, *_: self.average(inner))

    # ---- batches

    def begin_batch(self, place: MicroBatch) -> None:
        is_later_part = place.position > 0 and place.is_part
        if is_later_part and not self._used and any(map(_has_gradients, self._optimizers)):
            self._refuse_parts(_NO_BACKWARD)
        self.group.begin(place)
        self._stepped.clear()
        self._seen.clear()
        self._in_group = self._in_group or self._state.accumulation_steps > 1 or place.is_part
        if self.group.holds:
            for optimizer in self._optimizers:
                self._set_aside(optimizer)

    def _begin_update(
        self, optimizer: torch.optim.Optimizer, args: Any, kwargs: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]]:
        self._step.check_warm_up()
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if not self.in_helper:
            self._state.timing.enter(OPTIMIZER)
            self._check_step(optimizer)
            if closure is None:
                self.average(optimizer)
        self._step.begin_update(optimizer)
        if closure is None:
            return args, kwargs

        def averaging() -> Any:
            loss = closure()
            self.average(optimizer)
            if not isinstance(loss, torch.Tensor):
                return loss
            # A line search must take the same steps on all workers.
            return loss.new_tensor(self.mean_over_workers(loss.item()))

        return args[:1], {**kwargs, "closure": averaging}

    def check_complete(self) -> None:
        if self.group.holds and not self._has_updated():
            self._reject("train_batch makes no update in the last batch of a group")

    def _has_updated(self) -> bool:
        return any(map(self._step.num_updates, self._optimizers))

    def before_commit(self) -> None:
        self.check_complete()
        has_shares = self._state.settings.options.elastic.shares != "even"
        if has_shares and self.group.place.share != 1.0 and not self._used and self._has_updated():
            self._state.say(
                "weight",
                "ElasticConfig(shares=...): train_batch does not call self.backward(loss), so the "
                "losses of workers with different shares have equal weight. Call it instead of "
                "loss.backward().",
            )
        if self._used and len(self._optimizers) > 1 and self._has_updated():
            # A loss may leave gradients in parameters of another optimizer. If no optimizer
            # stepped, keep them, because user code accumulates gradients.
            self._zero_gradients()

    def commit(self) -> None:
        for held in (self._stepped, self._aside, self._returned, self._seen):
            held.clear()
        self._used = self._in_group = False
        self.group.reset()

    def roll_back(self) -> None:
        self._zero_gradients()
        self.commit()

    def _zero_gradients(self) -> None:
        for optimizer in self._optimizers:
            optimizer.zero_grad(set_to_none=True)

    # ---- within a batch

    def backward(self, loss: torch.Tensor, num_samples: float | torch.Tensor | None) -> None:
        count = None if num_samples is None else as_count(num_samples)
        is_sum = self.group.is_sum
        if count is None and not is_sum and not self._state.data.counts_samples:
            count = self.group.samples
        if self._stepped:
            self._refuse_parts("train_batch computes gradients after it has stepped an optimizer")
        if self._in_group:
            weight = self._weigh_in_group(count)
        elif count is None:
            weight = self.group.place.share
        else:  # several losses of a batch may have different counts
            counted = 0.0 if self.group.place.size == 0 else count
            mean_count = self.mean_over_workers(counted)
            weight = counted / mean_count if counted else 0.0
        if is_sum:  # the workers average gradients
            weight = 0.0 if self.group.place.size == 0 else float(self._state.num_averaged)
        if count == 0 and not loss.detach().isfinite().all():
            _zero_gradients_of(loss)  # 0 * NaN would be NaN
        self._used = True
        self.precision.backward(loss if weight == 1.0 else loss * weight, self.group.is_last)
        if self.precision.scales or not self.group.is_last:
            self._seen = {id(optimizer): _gradients_of(optimizer) for optimizer in self._optimizers}

    def _weigh_in_group(self, count: float | None) -> float:
        """Return the weight of a loss, after correcting the gradients of earlier batches."""
        for optimizer in self._optimizers:
            self._check_unchanged(optimizer)
        self._put_back()
        correction, weight = self.group.weigh(count, self.mean_over_workers, self.sums_each_batch)
        if correction != 1.0 and not self.group.is_sum:
            if self.sums_each_batch and count is None:
                self._refuse_parts("a batch has another number of samples than was planned")
                raise RuntimeError(
                    "The batches of an accumulation group differ from the expected numbers of "
                    'samples. With register(sharding="full"), raysgd cannot correct that. Use a '
                    "loader that raysgd partitions, override num_items(batch), call "
                    "backward(loss, num_samples=...), or do not accumulate."
                )
            self._multiply_gradients(correction)
        return weight

    def step(self, optimizer: torch.optim.Optimizer) -> bool:
        self._step.check_warm_up()
        if id(optimizer) in self._stepped:
            self._reject(f"train_batch steps the same {type(optimizer).__name__} twice")
        self._stepped.add(id(optimizer))
        if _needs_closure(type(optimizer).step):
            raise TypeError(
                f"{type(optimizer).__name__}.step() needs a closure, which optimizer_step() does "
                "not have. Override train_batch, and call self.optimizer.step(closure) in it."
            )
        if self._check_unchanged(optimizer):
            why = self.needs_helper or self.precision.name
            raise RuntimeError(
                "train_batch changes gradients between self.backward(loss) and self.optimizer_step("
                f"optimizer). With {why}, they are not final there. Clip with "
                "register(max_grad_norm=...), or change them in a hook: call "
                "optimizer.register_step_pre_hook(fn) in setup, before register."
            )
        group = self.group
        needs_backward = _has_gradients(optimizer) or (group.holds and group.is_last)
        if self._in_group and needs_backward and not group.has_backward:
            self._reject(_NO_BACKWARD)
        if not group.is_last:
            self._set_aside(optimizer)
            return False
        self.in_helper = True
        try:
            self.average(optimizer)
            for feature in self._state.features:
                feature.before_update(optimizer)
            before = self._step.num_updates(optimizer)
            self.precision.step(optimizer)
        finally:
            self.in_helper = False
        if self._step.num_updates(optimizer) == before:  # an overflow, so the update was skipped
            self.end_update(optimizer)
        optimizer.zero_grad(set_to_none=True)
        for parameter in _parameters(optimizer):
            self._returned.pop(parameter, None)
        return True

    def gradients(self, optimizer: torch.optim.Optimizer) -> tuple[Any, torch.Tensor]:
        """Unscale the gradients of an optimizer, and return their tensors and their norm.

        The tensors have this worker's gradients. The norm covers all workers.
        """
        self.precision.unscale(optimizer)
        held = self.rows(self.precision.parameters(optimizer))
        norm = torch.nn.utils.get_total_norm([p.grad for p in held if p.grad is not None])
        return held, self.whole_norm(norm)

    def _refuse_parts(self, why: str) -> None:
        self._state.parts.refuse(why, self.group.place)

    def _reject(self, why: str) -> None:
        self._refuse_parts(why)
        if self._in_group:
            raise RuntimeError(
                f"{why}. With {self.needs_helper}, call self.backward(loss) and "
                "self.optimizer_step(optimizer) once for every batch."
            )

    def _multiply_gradients(self, factor: float) -> None:
        parameters = [p for model in self._state.models for p in model.parameters()]
        for optimizer in self._optimizers:
            parameters += _parameters(optimizer)
        gradients = [*self._returned.values(), *(p.grad for p in parameters)]
        held = {id(gradient): gradient for gradient in gradients if gradient is not None}
        multiply_all(held.values(), factor)

    def _set_aside(self, optimizer: torch.optim.Optimizer) -> None:
        """Set the gradients of an optimizer aside until the backward pass of the next batch.

        Neither other losses of the same batch nor ``zero_grad`` may change these gradients.
        """
        for parameter in _parameters(optimizer):
            returned = self._returned.pop(parameter, None)
            gradient = returned if parameter.grad is None else parameter.grad
            if gradient is not None:
                self._aside.setdefault(parameter, gradient)
                parameter.grad = None

    def _put_back(self) -> None:
        """Restore the gradients of earlier batches, also after a ``zero_grad`` between losses.

        With several optimizers, restore copies, because ``zero_grad`` must discard gradients that a
        loss added to the parameters of another optimizer.
        """
        is_first, are_several = not self.group.has_backward, len(self._optimizers) > 1
        if is_first:
            self._returned, self._aside = self._aside, {}
        for parameter, gradient in self._returned.items():
            if is_first or (are_several and parameter.grad is None):
                parameter.grad = gradient.clone() if are_several else gradient
            elif parameter.grad is None:
                raise RuntimeError(
                    "zero_grad() between two losses of a batch removed accumulated gradients. Call "
                    "zero_grad() before the first self.backward(loss) of the batch, or not at all."
                )

    # ---- checks

    def end_update(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if any(optimizer is registered for registered in self._optimizers):
            self._step.end_update(optimizer)
            for feature in self._state.features:
                feature.after_update(optimizer)
            if not self.in_helper:
                self._state.timing.enter(OTHER)

    def _check_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Reject ``optimizer.step()`` in user code that must call `step` instead."""
        if self._step.is_open:
            self._refuse_parts("train_batch calls optimizer.step(), not self.optimizer_step()")
        features = self._state.features
        why = next((each.needs_helper for each in features if each.needs_helper), "")
        if not why and self._used and self.precision.scales:
            why = f"the scaled gradients of self.backward(loss) under {self.precision.name}"
        if why:
            raise RuntimeError(
                f"{type(optimizer).__name__}.step() ignores {why}. Call self.backward(loss) and "
                "self.optimizer_step(optimizer) in train_batch instead."
            )

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Unscale the gradients of an optimizer, so that user code may change them."""
        self.precision.unscale(optimizer)
        self._seen.pop(id(optimizer), None)

    def _check_unchanged(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether user code has changed gradients since a loss, for example by clipping.

        Reject parts if it changes the gradients of a part.
        """
        seen = self._seen.get(id(optimizer))
        changed = seen is not None and seen != _gradients_of(optimizer)
        if changed:
            self._refuse_parts("train_batch changes gradients before it steps an optimizer")
        return changed


def _zero_gradients_of(loss: torch.Tensor) -> None:
    """Zero the gradients of a loss that is not finite, such as a mean over no items.

    The backward pass must run, because the workers average gradients in it.
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


@functools.cache
def _needs_closure(step: Any) -> bool:
    return "closure" in required_arguments(step)


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _has_gradients(optimizer: torch.optim.Optimizer) -> bool:
    return any(parameter.grad is not None for parameter in _parameters(optimizer))


def _gradients_of(optimizer: torch.optim.Optimizer) -> list[tuple[int, int]]:
    """Return the identities and versions of gradients, to detect changes."""
    gradients = [parameter.grad for parameter in _parameters(optimizer)]
    return [(id(each), 0 if each is None else version_of(each)) for each in gradients]
