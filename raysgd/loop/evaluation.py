"""The calls ``validate`` and ``predict`` on one worker."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from raysgd._internal.nested import unchanged
from raysgd.data.source import BatchSource, PartitionedSource
from raysgd.loop.operator_base import checked_result
from raysgd.loop.requests import RehearseRequest, ValidateRequest
from raysgd.loop.signal import Signal
from raysgd.metrics import NUM_SAMPLES, Summary, rename_metrics

if TYPE_CHECKING:
    from raysgd.loop.loop import Loop

__all__ = ["Evaluation", "no_batch", "weighted"]


class Evaluation:
    """Evaluates for a `Loop`, to whose results it adds."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self.batches: _Counted | None = None
        """What is read in the evaluation in progress."""
        self.total: int | None = None
        """Number of its batches; None if that is unknown."""
        self.start: tuple[int, int] | None = None
        """The newest call of ``validate``, and the offset at which it began."""

    def validate(self, request: ValidateRequest) -> Mapping[str, Any]:
        """Evaluate the rest of the validation loader, or so many steps, round and round.

        A repeated call begins where it did. Of several loaders, or of one that is given with the
        call, each is read from its start.
        """
        call, loader = request.call, request.loader
        self._loop.begin(call)
        self._loop.profile(request.profile)
        self._loop.num_covered = None
        train_state = self._loop.train_state
        if self.start is None or self.start[0] != call:
            start = 0 if request.from_start else train_state.validation_offset
            self.start = call, start
        sources = (
            train_state.data.validation_sources() if loader is None else self._sources_of(loader)
        )
        with train_state.evaluating():
            for name, source in sources.items():
                source.limit(request.limit)
                offset = 0 if name else self.start[1]
                offset = self._evaluate(name, source, offset, request.num_steps, request.info)
        train_state.end_segment()
        if loader is not None:
            self._close(sources)
        elif "" in sources:
            train_state.validation_offset = offset
        self.batches = self.total = None
        return self._loop.result()

    def _evaluate(
        self, name: str, source: BatchSource, offset: int, left: int | None, info: Any
    ) -> int:
        """Evaluate the rest of a loader, or some steps, and return the offset after them."""
        operator = self._loop.operator
        source.agree_on_order(0, offset, self._loop.train_state)
        while left is None or left > 0:
            num_left = source.steps_left(offset)
            limit = min((n for n in (left, num_left) if n is not None), default=None)
            taken_from = source.batches(0, offset, limit)
            batches = self.batches = _Counted(taken_from, self._loop.signal)
            self.total, self._loop.train_state.meters = limit, None
            try:
                with self._loop.train_state.timers.record("validation"):
                    metrics = operator.validate(batches, info)
            except BaseException:
                source.close_workers()
                raise
            metrics = checked_result(operator.validate, metrics)
            # that of a worker without any batch counts for nothing
            weight = batches.count or not batches.exhausted
            metrics = weighted(metrics, weight)
            metrics = rename_metrics(metrics, f"val/{name}") if name else metrics
            self._loop.results.append((self._loop.train_state.global_step, metrics))
            # sized loader: count the group's steps, not this rank's batches
            taken = batches.count if num_left is None or limit is None else limit
            if offset == 0 and (num_left == 0 or (batches.exhausted and taken == 0)):
                context = self._loop.train_state.context
                own = not source.sharded and context.world_size > 1
                raise no_batch("validation", source, context.world_rank if own else None)
            is_end = limit is None or taken < limit or taken == num_left
            offset = 0 if is_end else source.offset_after(offset, taken)
            if left is None or (taken == 0 and not batches.exhausted):
                break
            left -= taken
        return offset

    def _sources_of(self, loader: Any) -> dict[str, BatchSource]:
        """Return what to read of a loader that was given with a call, or of what makes one."""
        makes_one = callable(loader) and not isinstance(loader, Iterable)
        made = loader(self._loop.operator.config) if makes_one else loader
        return self._loop.train_state.data.sources_of(made)

    def predict(self, loader: Any) -> list[tuple[int, Any]]:
        """Return what the operator predicts for this worker's batches, on CPU, with their places.

        Places grow in the order of the loader, over all workers.
        """
        train_state, operator = self._loop.train_state, self._loop.operator
        sources = self._sources_of(loader)
        if [*sources] != [""]:
            raise TypeError(f"predict() takes one loader, not {len(sources)}: call it for each.")
        source = sources[""]
        if source.shuffles:
            raise ValueError(
                "predict(): the loader shuffles, so that nobody could tell which sample a result "
                "is of. Give one with shuffle=False."
            )
        if not source.sharded and train_state.context.world_size > 1:
            raise TypeError(
                f"predict(): the loader is partitioned by {source.partitioned_by}, so that the "
                "results would have no order. Give a loader of a data set that can be indexed."
            )
        if source.steps_left(0) == 0:
            raise no_batch("given", source)
        source.agree_on_order(0, 0, train_state)
        places, found = source.places_of_batches(), []
        with train_state.evaluating():
            batches = self.batches = _Counted(source.batches(0, 0), self._loop.signal)
            try:
                for output in operator._predictions(batches):
                    found.append((next(places), train_state.to_cpu(output)))
            finally:
                self.batches = None
                self._close(sources)
        train_state.end_segment()
        if isinstance(source, PartitionedSource) and next(places, None) is not None:
            raise RuntimeError(
                f"{type(source.loader).__name__} gave {len(found)} batches, fewer than its sampler "
                "has: nobody could tell which samples these are. Let it give one for each."
            )
        return found

    def _close(self, sources: Mapping[str, BatchSource]) -> None:
        """End the worker processes of loaders that a call was given."""
        for source in sources.values():
            source.close_workers()

    def rehearse(self, request: RehearseRequest) -> Mapping[str, Any] | None:
        """Validate so many batches to see that it can be done, and leave all as it was.

        What can be read once only, or counts how often it is read, is left alone: then it is None.

        Returns:
            The metrics.
        """
        train_state = self._loop.train_state
        sources = train_state.data.validation_sources()
        if not all(source.can_be_tried for source in sources.values()):
            return None
        with (
            unchanged(self._loop),
            unchanged(self),
            unchanged(self._loop.operator),
            unchanged(train_state),
            train_state.rehearsing(),
        ):
            trial = ValidateRequest(
                call=-1, num_steps=request.num_steps, from_start=True, info=request.info
            )
            metrics = self.validate(trial)
        self._close(sources)
        return metrics


class _Counted:
    """An iterator that counts what it yields, and can be stopped."""

    def __init__(self, batches: Iterator[Any], signal: Signal) -> None:
        self._batches = batches
        self.signal = signal
        self.count = 0
        self.exhausted = False

    def __iter__(self) -> _Counted:
        return self

    def __next__(self) -> Any:
        self.signal.raise_stop()
        try:
            with self.signal.waiting():
                batch = next(self._batches)
        except StopIteration:
            self.exhausted = True
            raise
        self.count += 1
        return batch


def weighted(metrics: Mapping[str, Any], num_batches: float) -> Mapping[str, Any]:
    """Let metrics that come without a number of samples count by the batches that they cover."""
    if NUM_SAMPLES in metrics or isinstance(metrics, Summary):
        return metrics
    return Summary(metrics, dict.fromkeys(metrics, num_batches))


def no_batch(name: str, source: BatchSource, rank: int | None = None) -> RuntimeError:
    """Return the error for a loader without batches; of one worker, if a rank is given."""
    name = f"{name} loader" if rank is None else f"{name} loader of worker {rank}"
    if isinstance(source.loader, Iterator):
        return RuntimeError(
            f"The {name} gives no more batch: {source.describe()}. An iterator, such as a "
            "generator, can be read once: register something that iter() starts again, like a "
            "DataLoader, a list or an object whose __iter__ is the generator."
        )
    return RuntimeError(
        f"The {name} gives no batch: {source.describe()}. Use more data, a smaller batch "
        "size or drop_last=False."
    )
