"""Compare the replicas of the workers, and report a difference."""

import contextlib
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from raysgd.errors import ReplicasDifferError
from raysgd.loop.differences import differing, digest_of, format_values, minority_of, name_workers
from raysgd.loop.feature import UpdateFeature
from raysgd.loop.update import Update
from raysgd.torch.features.averaging import WeightAveraging
from raysgd.torch.features.guard_contents import ReplicaContents
from raysgd.torch.options import Guard
from raysgd.torch.tensors import describe_platform, is_readable, tensor_digest
from raysgd.torch.train_state import TorchTrainState

_LAG = 2
"""Steps after which a GPU has finished a comparison, so that reading the result does not wait."""
_SMALL = 2**13
"""Number of elements up to which a comparison between calls reads all of a tensor."""
_MAX_SHOWN = 5
_REMEDY = (
    "Load a checkpoint from before the difference: trainer.load(path). Or continue with the state "
    "of {}: trainer.load_state_dict(trainer.state_dict())."
)
_NOT_IN_STATE = (
    "States do not contain options of modules and losses: first set them on all workers by "
    "trainer.apply_all_operators, and return them from state_dict of the operator for new workers. "
)


class _Comparison(NamedTuple):
    """A comparison whose result is not read yet."""

    minima: torch.Tensor  # of digests, and of their inverses
    event: torch.cuda.Event | None  # when a GPU has finished it
    flags: tuple[bool, bool]  # the first two arguments of `ReplicaContents.contents`
    is_complete: bool


class ReplicaGuard(UpdateFeature):
    """Compares digests of `ReplicaContents` between the workers.

    A complete comparison precedes a call that follows a join or a change, and repeats every
    ``Guard.every`` steps. After a call of fewer steps, workers read only their part of each large
    tensor. A digest reads memory once, and a step does so several times. Therefore comparisons take
    a small fraction of the time for all models.
    """

    def __init__(
        self, train_state: TorchTrainState, averaging: WeightAveraging, guard: Guard
    ) -> None:
        self._train_state, self._contents = train_state, ReplicaContents(train_state, averaging)
        self._every = guard.every
        self._on_gpu = train_state.settings.device.type != "cpu"
        self._problem = ""  # the difference that was found, until a state is loaded
        self._equal_step = 0
        self.begin_generation()

    # ---- what changes the group or the state

    def sync_initial_state(self) -> None:
        self._contents.record_buffers()

    sync_buffers = sync_initial_state

    def begin_generation(self) -> None:
        self._is_due = self._is_new = True
        self._is_active = self._in_call = False
        self._pending: _Comparison | None = None
        self._steps = self._compared_step = self._complete_step = 0

    def receive(self, leader_rank: int) -> Callable[[], None]:
        self._contents.record_buffers()
        return self._contents.record_buffers

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        # If this is the state of another worker, that worker still has the problem.
        self._problem, self._is_due = "", True

    def after_user_function(self) -> None:
        self._is_due = self._is_new = True

    # ---- calls and steps

    def begin_call(self, logs_steps: bool) -> None:
        self._compare_between_steps()
        self._in_call = True

    def end_call(self) -> None:
        self._compare_between_steps()
        self._in_call = False

    def _compare_between_steps(self) -> None:
        """Compare if a call ends or continues after a pause, or if something may have changed."""
        if self._problem:
            raise ReplicasDifferError(self._problem)
        self._set_active()
        if self._is_active and (self._is_due or self._in_call):
            self._contents.check_added()
            number = self._every // max(1, self._steps - self._compared_step)
            self._compare(one_in=1 if self._is_due else max(1, number))
        self._is_due = False

    def _set_active(self) -> None:
        num_workers = self._train_state.settings.context.world_size
        self._is_active = num_workers > 1 and self._train_state.placement.replicates

    def before_export(self) -> None:
        self._set_active()  # a new group may not have trained yet
        has_changed = self._is_due or self._steps > self._complete_step
        # A worker that got the state of another since the difference has no problem.
        any_rank = self._train_state.collectives.any_rank
        if self._is_active and has_changed and not any_rank(bool(self._problem)):
            self._compare()

    def evaluating(self) -> contextlib.AbstractContextManager[Any]:
        self._contents.has_run = True
        return super().evaluating()

    def begin_update(self, update: Update) -> None:
        if not self._is_active:
            return
        self._contents.has_run = True
        self._contents.check_added()
        if self._pending is not None and self._steps - self._compared_step >= _LAG:
            self._finish_comparison()
        # After one step, a replacement has what `train_batch` sets itself.
        is_new = self._is_new and self._steps > self._complete_step
        # A worker that repeats a step does not compare again.
        if is_new or self._steps - self._complete_step >= self._every:
            self._is_new = self._is_new and not is_new
            self._compare(in_step=True, is_new=is_new)

    def commit(self, update: Update) -> None:
        self._steps += 1

    # ---- comparison

    def _compare(self, in_step: bool = False, is_new: bool = False, one_in: int = 1) -> None:
        """Exchange digests with the other workers. A step does not wait for a GPU to finish it."""
        self._finish_comparison()
        digests, is_complete = self._digests(in_step, is_new, one_in)
        minima = self._train_state.collectives.all_reduce_min_tensor(torch.cat([digests, ~digests]))
        event = None
        if self._on_gpu:
            minima = torch.empty_like(minima, device="cpu", pin_memory=True).copy_(minima, True)
            event = torch.cuda.Event()
            event.record()
        self._pending = _Comparison(minima, event, (in_step, is_new), is_complete)
        self._compared_step = self._steps
        self._complete_step = self._steps if is_complete else self._complete_step
        if not (in_step and self._on_gpu):
            self._finish_comparison()

    def _digests(self, in_step: bool, is_new: bool, one_in: int) -> tuple[torch.Tensor, bool]:
        """Return four digests: of options, of names of buffers that count, of tensors, of buffers.

        Of large tensors, this reads only the first of `one_in` equal parts. Frozen parameters were
        read for a join. The second result is whether everything was read.
        """
        options, counted, is_complete = [], [], True
        groups: dict[tuple[bool, torch.device], list[torch.Tensor]] = defaultdict(list)
        for kind, name, value in self._contents.contents(in_step, is_new):
            is_frozen = isinstance(value, torch.nn.Parameter) and not value.requires_grad
            if is_frozen and self._is_due:
                options.append((name, self._train_state.frozen_parameters.digest_of(value)))
            elif isinstance(value, torch.Tensor):
                is_large = one_in > 1 and value.numel() > _SMALL
                if is_large and is_readable(value) and value.is_contiguous():
                    size = max(_SMALL, value.numel() // one_in)
                    value, is_complete = value.detach().view(-1)[:size], False
                groups[kind == "buffers", value.device].append(value)
            if kind == "options":
                options.append((name, value))
            elif kind == "buffers" and value is not None:
                counted.append(name)
        digests = torch.tensor([digest_of(options), digest_of(counted), 0, 0])
        digests = digests.to(self._train_state.settings.device, non_blocking=True)
        for (is_buffer, device), tensors in groups.items():
            digests[2 + is_buffer] += tensor_digest(tensors, device).to(digests, non_blocking=True)
        return digests, is_complete

    def _finish_comparison(self) -> None:
        """Read the result of a comparison. Report a difference."""
        if self._pending is not None:
            (minima, event, flags, is_complete), self._pending = self._pending, None
            if event is not None:
                event.synchronize()
            lowest, lowest_inverse = minima.view(2, -1)
            options, counted, tensors, buffers = (lowest == ~lowest_inverse).tolist()
            # Forward passes may have changed other buffers on some workers.
            if not (options and tensors and (buffers or not counted)):
                self._report_difference(flags)
            elif is_complete:
                self._equal_step = self._train_state.position.global_step

    # ---- a difference

    def _report_difference(self, flags: tuple[bool, bool]) -> None:
        train_state, step = self._train_state, self._train_state.position.global_step
        # A loaded state may be older.
        self._equal_step = min(self._equal_step, step)
        local: dict[tuple[str, str], Any] = {}
        for kind, name, value in self._contents.contents(*flags):
            is_tensor = isinstance(value, torch.Tensor)
            local[kind, name] = int(tensor_digest([value], value.device)) if is_tensor else value
        context, kind = train_state.settings.context, describe_platform(train_state.settings.device)
        # If a failure interrupts the exchange, others may get this worker's state when they rejoin.
        self._problem = (
            f"After step {step}, the workers differ. A failure interrupted the report of the "
            f"differences. They were equal after step {self._equal_step}. "
            f"{_REMEDY.format('worker 0')}"
        )
        report = local, kind, self._equal_step
        broadcast = train_state.collectives.broadcast
        reports = [broadcast(lambda: report, rank) for rank in range(context.world_size)]
        kinds = {kind for _, kind, _ in reports}
        self._equal_step = max(step for _, _, step in reports)  # a new worker has compared nothing
        differences = differing([contents for contents, _, _ in reports])
        self._problem = ""
        if not differences:  # the replicas differed for a moment
            return
        minority = minority_of(differences, context.world_size)
        message = self._message(differences, minority)
        if len(kinds) > 1 and not any(kind == "options" for kind, _ in differences):
            train_state.settings.warn_once(
                "devices",
                "%s The workers compute on different devices or with different numbers of threads "
                "(%s), so this may be rounding.",
                message,
                ", ".join(sorted(kinds)),
            )
        else:
            self._problem = message
            # The next generation then starts from the state of the majority.
            if context.world_rank in minority:
                train_state.is_damaged = True
            # Wait until all know it, because the driver interrupts the others if one raises.
            train_state.collectives.barrier()
            raise ReplicasDifferError(message, ranks=minority)

    def _message(self, differences: Mapping[tuple[str, str], Any], minority: list[int]) -> str:
        who = f"{name_workers(minority)} and the majority" if minority else "the workers"
        options = {name: value for (kind, name), value in differences.items() if kind == "options"}
        names = [f"{name} ({format_values(values)})" for name, values in options.items()]
        names += [name for _, name in differences if name not in options]
        text = "; ".join(names[:_MAX_SHOWN])
        in_modules = any(name.startswith("models") for name in options)
        in_modules |= any(name.startswith("criteria") for _, name in differences)
        if len(names) > _MAX_SHOWN:
            text += f"; and {len(names) - _MAX_SHOWN} more"
        step = self._train_state.position.global_step
        return (
            f"After step {step}, {who} differ in: {text}. They were equal after step "
            f"{self._equal_step}. Common causes: code that changes them on one worker only, such "
            "as an option or random numbers with another seed; a damaged copy; broken memory. "
            f"{_NOT_IN_STATE if in_modules else ''}"
            f"{_REMEDY.format('the majority' if minority else 'worker 0')}"
        )
