"""Compare the replicas of the workers, and report or repair a difference."""

from __future__ import annotations

import contextlib
import itertools
import math
import numbers
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from raysgd.errors import ReplicasDifferError
from raysgd.loop.feature import ShardedFeature, StepFeature
from raysgd.loop.step import UpdateTransaction
from raysgd.torch import collectives, ddp
from raysgd.torch.digests import digest_of
from raysgd.torch.features.cross_check import cross_check
from raysgd.torch.features.differences import (
    differing,
    hash_of,
    kind_of,
    majority_of,
    named_workers,
    shown,
)
from raysgd.torch.features.replication import Replication
from raysgd.torch.interop.horovod import HorovodGradients
from raysgd.torch.state import version_of

if TYPE_CHECKING:
    from raysgd.torch.options import Guard
    from raysgd.torch.train_state import TorchTrainState

_BUDGET = 0.001
"""Share of the training time that comparisons within a call may take."""
_FIRST = 100
"""Steps before the first comparison of a call, because its cost is not known yet."""
_LAG = 2
"""Steps after which a GPU has finished a comparison, so that reading the result does not wait."""
_ABSTAINS = 2**63 - 1
_MOST_SHOWN = 5
_CAUSES = {
    "options": "code that sets an option on one worker only",
    "parameters": "code that changes parameters on one worker only, such as a new initialization "
    "or noise with another seed",
    "buffers": "code that changes buffers on one worker only",
    "optimizers": "code that changes an optimizer or a scaler on one worker only",
}
_DAMAGE = "a damaged copy or broken memory"
Content = tuple[str, str, Any]


class ReplicaGuard(StepFeature):
    """Compares digests of parameters, buffers, optimizers, and options between the workers.

    Workers compare at the end of a call, before a call that follows a join or a change, and within
    calls as often as `_BUDGET` allows. All workers must compare at the same steps. Therefore the
    interval follows from numbers that the workers exchange.

    Forward passes change some buffers, such as statistics. A buffer counts only if it has not
    changed since all workers last had the same.
    """

    def __init__(self, state: TorchTrainState, guard: Guard) -> None:
        options = state.settings.options
        self._state, self._guard = state, guard
        self.repaired = ()
        self._wraps_all = options.wrap_ddp or options.use_horovod
        self._on_gpu = state.settings.device.type != "cpu"
        self._problem = ""  # the difference that was found, until a state is loaded
        self._is_due = self._is_new = True
        self._in_call = self._follows = self._is_active = False
        self._first = self._interval = _FIRST if guard.every == "auto" else int(guard.every)
        self._steps = self._compared_at = self._equal_at = 0
        self._mark, self._cost_s = (0, 0.0), 0.0
        self._pending: tuple[torch.Tensor, Any, tuple[bool, bool]] | None = None
        self._buffers: dict[str, tuple[Any, int]] = {}
        self._batch: Any = None  # of the step before a cross-check
        self._adopt()
        if guard.crosscheck_every and self._renormalized:
            raise ValueError(
                f"Guard(crosscheck_every={guard.crosscheck_every}): each forward pass changes an "
                "Embedding with max_norm, so workers compute other gradients. Leave out one of the "
                "two."
            )

    # ---- what changes the group or the state

    def start_together(self) -> None:
        self._note_buffers()

    def enter(self) -> None:
        self._is_due = self._is_new = True
        self._in_call, self._pending = False, None
        self._steps, self._compared_at, self._interval = 0, 0, self._first

    def receive(self, leader: int) -> Callable[[], None]:
        self._follows = leader != self._state.context.world_rank
        self._note_buffers()
        return self._end_receive

    def _end_receive(self) -> None:
        self._follows = False
        self._note_buffers()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if not self._follows:  # the state of another worker may be the wrong one
            self._problem = ""
        self._is_due = True

    def after_apply(self) -> None:
        self._is_due = True

    def sync_buffers(self) -> None:
        self._note_buffers()

    # ---- calls and steps

    def check_trained(self) -> None:
        """Compare at the end of a call, and before a call if something may have changed."""
        if self._problem:
            raise ReplicasDifferError(self._problem)
        self._is_active = self._state.context.world_size > 1 and self._state.replicated
        if self._is_active and (self._is_due or self._in_call):
            self._compare()
            self._settle()
        self._is_due = self._in_call = False

    def begin_call(self, logs_steps: bool) -> None:
        self._in_call, self._mark = True, (self._steps, time.perf_counter())

    def begin(self, tx: UpdateTransaction) -> None:
        if not self._is_active:
            return
        if self._structure() != self._adopted:
            self._check_added()
        since = self._steps - self._compared_at
        if self._pending is not None and since >= min(_LAG, self._interval):
            self._settle()
        # After one step, a replacement has what `train_batch` sets itself.
        is_new = self._is_new and self._steps > 0
        if since >= self._interval or is_new:  # not again if this worker repeats a step
            self._compare(in_step=True, is_new=is_new)
            self._is_new = self._is_new and not is_new
            if not self._on_gpu:
                self._settle()

    def before_commit(self, tx: UpdateTransaction) -> None:
        if self._guard.crosscheck_every and self._state.segment is not None:
            self._batch = self._state.segment.batch

    def commit(self, tx: UpdateTransaction) -> None:
        self._steps += 1

    def after_step(self, compute: Callable[[Any], contextlib.AbstractContextManager[Any]]) -> None:
        batch, self._batch, every = self._batch, None, self._guard.crosscheck_every
        if not (every and self._is_active) or self._steps % every:
            return
        state = self._state
        equal = {place for n in range(len(state.models)) for place, _ in self._equal_buffers(n)}
        source = self._steps // every % state.context.world_size
        self._problem, ranks = cross_check(state, batch, source, compute)
        self._note_buffers(equal)
        if self._problem:
            raise ReplicasDifferError(self._problem, ranks=ranks)

    # ---- what is added after `register`

    def _adopt(self) -> None:
        """Record the modules and parameters of the registered models."""
        state = self._state
        modules = [module for model in state.models for module in model.modules()]
        self._children = [held for m in modules for held in (m._modules, m._parameters)]
        self._named = [list(ddp.plain(model).named_parameters()) for model in state.models]
        self._parameters = [parameter for named in self._named for _, parameter in named]
        self._renormalized = {  # Each forward pass may change the rows of its batch.
            module.weight
            for module in modules
            if isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag) and module.max_norm
        }
        groups = [group for o in state.optimizers for group in o.param_groups]
        self._stepped = {parameter for group in groups for parameter in group["params"]}
        self._adopted = self._structure()

    def _structure(self) -> list[Any]:
        """Return what identifies modules, parameters, and groups, within microseconds."""
        children = itertools.chain.from_iterable([held.values() for held in self._children])
        sizes = [len(g["params"]) for o in self._state.optimizers for g in o.param_groups]
        return [*map(id, children), *[p.dtype for p in self._parameters], *sizes]

    def _check_added(self) -> None:
        """Raise an error if the next step would train what the workers do not keep equal."""
        for feature in self._state.features:
            if isinstance(feature, Replication | HorovodGradients | ShardedFeature):
                feature.check_trained()
        before = self._stepped
        self._adopt()
        if strangers := self._stepped - before - set(self._parameters):
            raise RuntimeError(
                f"An optimizer got {len(strangers)} parameters after register() that are in no "
                "registered model. Checkpoints and new workers would not have them. Register "
                "their model in setup. To train it later, call requires_grad_(False) after "
                "register()."
            )

    # ---- what must be equal

    def _contents(self, in_step: bool, is_new: bool) -> Iterator[Content]:
        """Iterate over what must be equal: its kind, its name, and a tensor or a plain value.

        The value of a buffer is None if it does not count.
        """
        state = self._state
        is_sharded = any(feature.is_fully_sharded for feature in state.sharded_features)
        replicated: set[torch.Tensor] = set()
        for index, (model, named) in enumerate(zip(state.models, self._named, strict=True)):
            own = ddp.replicated(model)
            if not (self._wraps_all or own):
                continue
            ignored: Any = model.parameters_to_ignore if own else ()
            for name, parameter in named:
                replicated.add(parameter)
                place = f"models[{index}].{name}"
                flags = str(parameter.dtype), tuple(parameter.shape), parameter.requires_grad
                yield "options", f"dtype, shape, and requires_grad of {place}", flags
                if not (is_sharded or name in ignored or parameter in self._renormalized):
                    yield "parameters", place, parameter
            equal = dict(self._equal_buffers(index))
            for place, _ in self._buffers_of(index):
                yield f"buffers {index}", place, equal.get(place)
            if in_step:
                modes = [module.training for module in model.modules()]
                yield "options", f"the train or eval modes of models[{index}]", modes
        divided = [feature.optimizer for feature in state.sharded_features]
        for index, optimizer in enumerate(state.optimizers):
            if not (self._wraps_all or replicated.issuperset(self._stepped)):
                continue
            is_divided = any(optimizer is each for each in divided)
            yield from _of_optimizer(f"optimizers[{index}]", optimizer, replicated, is_divided)
        for index, scheduler in enumerate(state.schedulers if self._wraps_all else ()):
            yield from _items("optimizers", f"schedulers[{index}]", scheduler.state_dict())
        yield from _items("optimizers", "scaler", state.optimization.precision.scales_of())
        yield from _items("parameters", "averages", state.averaging.averages)
        for name, held in ("models", state.models), ("criteria", state.criteria):
            for index, module in enumerate(held if is_new else ()):
                if isinstance(module, torch.nn.Module):
                    yield from _hyperparameters(f"{name}[{index}]", ddp.plain(module))

    def _buffers_of(self, index: int) -> Iterator[tuple[str, torch.Tensor]]:
        model = ddp.plain(self._state.models[index])
        statistics = set(map(id, ddp.running_statistics(model)))
        for name, buffer in model.named_buffers():
            if id(buffer) not in statistics and not buffer.is_inference():
                yield f"models[{index}].{name}", buffer

    def _equal_buffers(self, index: int) -> Iterator[tuple[str, torch.Tensor]]:
        """Iterate over the buffers that have not changed since all workers had the same."""
        for place, buffer in self._buffers_of(index):
            held, version = self._buffers.get(place, (lambda: None, 0))
            if held() is buffer and version_of(buffer) == version:
                yield place, buffer

    def _note_buffers(self, places: Container[str] | None = None) -> None:
        """Record all buffers, or those of `places`, because all workers have the same now."""
        self._buffers = {
            name: (weakref.ref(buffer), version_of(buffer))
            for index in range(len(self._state.models))
            for name, buffer in self._buffers_of(index)
            if places is None or name in places
        }

    # ---- comparison

    def _compare(self, in_step: bool = False, is_new: bool = False) -> None:
        """Send digests to the other workers. `_settle` reads the result."""
        self._settle()
        began = time.perf_counter()
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2 * self._on_gpu)]
        for event in events[:1]:
            event.record()
        digests, counts = self._digests(in_step, is_new)
        for event in events[1:]:
            event.record()
        cost_s = time.perf_counter() - began  # without the wait for other workers
        steps, trained_s = self._steps - self._mark[0], began - self._mark[1]
        wanted = self._interval
        if self._guard.every == "auto" and self._cost_s and steps > 0:
            wanted = max(1, math.ceil(self._cost_s / (_BUDGET * trained_s / steps)))
        digests = torch.where(counts, torch.stack([digests, ~digests]), _ABSTAINS)
        sent = torch.cat([digests.view(-1), digests.new_full((1,), -wanted)])
        found = collectives.lowest(sent)
        self._cost_s = cost_s
        if self._on_gpu:
            found = torch.empty_like(found, device="cpu", pin_memory=True).copy_(found, True)
            events.append(torch.cuda.Event())
            events[-1].record()
        self._pending = found, events, (in_step, is_new)
        self._compared_at, self._mark = self._steps, (self._steps, time.perf_counter())

    def _digests(self, in_step: bool, is_new: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a digest of each kind of content, and whether it counts, on the device."""
        device = self._state.settings.device
        kinds = ["parameters", "optimizers", *(f"buffers {n}" for n in range(len(self._named)))]
        tensors: dict[str, Any] = {kind: defaultdict(list) for kind in kinds}
        values, counts = [], dict.fromkeys(["options", *kinds], True)
        for kind, name, value in self._contents(in_step, is_new):
            if value is None:
                counts[kind] = False
            elif isinstance(value, torch.Tensor):
                tensors[kind][value.device].append(value)
            else:
                values.append((name, value))
        found = [torch.tensor(hash_of(values)).to(device, non_blocking=True)]
        for kind in kinds:
            parts = [digest_of(held, at) for at, held in tensors[kind].items()]
            zero = torch.zeros((), dtype=torch.int64, device=device)
            found.append(sum((part.to(device, non_blocking=True) for part in parts), zero))
        which = torch.tensor(list(counts.values())).to(device, non_blocking=True)
        return torch.stack(found), which

    def _settle(self) -> None:
        """Read the result of a comparison. Report or repair a difference."""
        if self._pending is None:
            return
        (found, events, flags), self._pending = self._pending, None
        for event in events[2:]:
            event.synchronize()
            self._cost_s = max(self._cost_s, events[0].elapsed_time(events[1]) / 1000)
        *lowest, interval = found.tolist()
        half = len(lowest) // 2
        if self._guard.every == "auto":
            self._interval = -interval
        if all(
            low in (~high, high) for low, high in zip(lowest[:half], lowest[half:], strict=True)
        ):
            self._equal_at = self._state.global_step
        else:
            self._handle(flags)

    def _handle(self, flags: tuple[bool, bool]) -> None:
        state = self._state
        own: dict[tuple[str, str], Any] = {
            (kind, name): int(digest_of([value], value.device))
            if isinstance(value, torch.Tensor)
            else value
            for kind, name, value in self._contents(*flags)
        }
        context, kind = state.context, kind_of(state.settings.device)
        given = [
            collectives.broadcast_object((own, kind), rank) for rank in range(context.world_size)
        ]
        kinds = {kind for _, kind in given}
        found = differing([contents for contents, _ in given])
        if not found:
            state.settings.warn_once(
                "digests", "The replicas differed for a moment, and are equal again."
            )
            return
        majority, minority = majority_of(found, context.world_size)
        message = self._message(found, minority)
        if len(kinds) > 1 and not any(kind == "options" for kind, _ in found):
            state.settings.warn_once(
                "devices",
                "%s The workers compute on different devices or with different numbers of threads "
                "(%s), so this may be rounding.",
                message,
                ", ".join(sorted(kinds)),
            )
        elif self._guard.on_difference == "repair" and majority and not state.sharded_features:
            self._repair(majority[0], context.world_rank in minority, flags)
            self.repaired = state.global_step, tuple(minority), message
        else:
            self._problem = message
            # The next generation then starts from the state of the majority.
            if context.world_rank in minority:
                state.transaction.is_partial = True
            raise ReplicasDifferError(message, ranks=minority)

    def _repair(self, leader: int, follows: bool, flags: tuple[bool, bool]) -> None:
        state = self._state
        state.share_training_state(leader, follows)
        self._follows = False
        given = state.from_rank(state.flags, leader)
        if follows:
            state.set_flags(given)
        self._guard, guard = replace(self._guard, on_difference="error"), self._guard
        self._compare(*flags)
        self._settle()
        self._guard = guard

    def _message(self, found: Mapping[tuple[str, str], Any], minority: list[int]) -> str:
        size = self._state.context.world_size
        who = "the workers"
        if minority and len(minority) < size:
            who = f"{named_workers(minority)} and the majority"
        names = [
            f"{name} ({shown(values)})" if kind == "options" else name
            for (kind, name), values in sorted(
                found.items(), key=lambda each: each[0][0] != "options"
            )
        ]
        text = "; ".join(names[:_MOST_SHOWN])
        if len(names) > _MOST_SHOWN:
            text += f"; and {len(names) - _MOST_SHOWN} more"
        kinds = {kind.split()[0] for kind, _ in found}
        causes = [cause for kind, cause in _CAUSES.items() if kind in kinds]
        causes += [_DAMAGE] * (kinds != {"options"})
        return (
            f"After step {self._state.global_step}, {who} differ in: {text}. They were equal "
            f"after step {self._equal_at}. Common causes: {'; '.join(causes)}. Load a checkpoint "
            "from before the difference: trainer.load(path). Or continue with the state of "
            f"{'the majority' if minority else 'worker 0'}: "
            "trainer.load_state_dict(trainer.state_dict())."
        )


def _of_optimizer(
    place: str, optimizer: Any, known: set[torch.Tensor], is_divided: bool
) -> Iterator[Content]:
    number = itertools.count()
    for index, group in enumerate(optimizer.param_groups):
        of_group = f"{place}.param_groups[{index}]"
        yield "options", f"the parameters of {of_group}", len(group["params"])
        for key, value in group.items():
            if key != "params":
                yield from _items("optimizers", f"{of_group}[{key!r}]", value)
        for parameter in group["params"]:
            which = next(number)
            if not (is_divided or parameter in known):
                yield "parameters", f"parameter {which} of {place}", parameter
            if not is_divided and (held := optimizer.state.get(parameter)):
                yield from _items("optimizers", f"{place}.state[{which}]", held)


def _items(kind: str, place: str, value: Any) -> Iterator[Content]:
    """Iterate over the tensors and plain values in nested dicts, lists, and tuples."""
    if isinstance(value, torch.Tensor):
        yield kind, place, value
    elif isinstance(value, dict):
        for key in sorted(value, key=str):
            yield from _items(kind, f"{place}[{key!r}]", value[key])
    elif isinstance(value, list | tuple):
        for key, each in enumerate(value):
            yield from _items(kind, f"{place}[{key}]", each)
    elif isinstance(value, numbers.Real):  # a loaded state may have another type of number
        yield "options", place, float(value)
    elif isinstance(value, str | None):
        yield "options", place, repr(value)


def _hyperparameters(place: str, model: torch.nn.Module) -> Iterator[Content]:
    """Iterate over options of PyTorch's own modules, such as the rate of a dropout."""
    for name, module in model.named_modules(prefix=place):
        if type(module).__module__.startswith("torch.nn.modules."):
            for key, value in vars(module).items():
                is_option = isinstance(value, int | float | str | tuple) and key[0] != "_"
                if is_option and key != "training":
                    yield "options", f"{name}.{key}", value
