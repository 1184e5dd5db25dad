"""The calls ``validate`` and ``predict`` on one worker."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from raysgd._internal.nested import check_rows, describe, preserving_attributes
from raysgd.data.source import BatchSource, SourceBatch
from raysgd.loop.loop_control import LoopControl
from raysgd.loop.metrics_recorder import MetricsRecorder
from raysgd.loop.operator_base import OperatorBase, as_metrics
from raysgd.loop.requests import ValidateRequest
from raysgd.loop.sources import empty_loader_error
from raysgd.metrics import NUM_SAMPLES, with_weight


class Evaluation:
    """Runs ``validate`` and ``predict``, and adds metrics to the results of the call."""

    def __init__(
        self, operator: OperatorBase, control: LoopControl, recorder: MetricsRecorder
    ) -> None:
        self._operator, self._control, self._recorder = operator, control, recorder
        self._train_state = operator._train_state
        self.batches: _EvaluationBatches | None = None

    def validate(self, request: ValidateRequest) -> Mapping[str, Any]:
        """Evaluate the rest of the validation loader, or a number of steps.

        A loader in the request is read from the start.
        """
        train_state, recorder = self._train_state, self._recorder
        recorder.begin(request.call_number)
        train_state.timers.enabled = request.profile
        if request.loader is None:
            source = train_state.data.source_or_missing("validation")
            train_state.position.validation_offset = self._evaluate(source, request.offset, request)
        else:
            source = self._source_of(request.loader)
            self._evaluate(source, 0, request)
            source.end_processes()
        return recorder.result()

    def _evaluate(self, source: BatchSource, offset: int, request: ValidateRequest) -> int:
        """Evaluate the steps of a request, and return the next offset."""
        operator, train_state, steps_left = self._operator, self._train_state, request.num_steps
        source.agree_on_order(0, offset, train_state.collectives)
        while steps_left is None or steps_left > 0:
            left_in_epoch = source.steps_left(offset)
            limit = min((n for n in (steps_left, left_in_epoch) if n is not None), default=None)
            timer, source.steps_read = train_state.timers.record("validation"), None
            with self._reading(source, offset, limit) as batches, timer:
                result = operator.validate(batches, request.info)
            metrics = as_metrics(operator.validate, result)
            # Workers never merge these, as `add_segment` may. Without a batch, they have no weight.
            metrics = with_weight(metrics, batches.num_finished_steps or not batches.is_exhausted)
            self._recorder.own_metrics.append((train_state.position.global_step, metrics))
            if limit is None or left_in_epoch is None:
                own, of_group = batches.num_finished_steps, source.steps_read
                num_steps = own if of_group is None else of_group
                ends_epoch = limit is None or num_steps < limit
                is_empty = num_steps == 0 and batches.is_exhausted
            else:  # of the group: this rank may have fewer batches
                num_steps, ends_epoch, is_empty = limit, limit == left_in_epoch, limit == 0
            if is_empty and offset > 0:  # the previous call stopped at the end of the loader
                offset = 0
                continue
            if is_empty:
                raise empty_loader_error("validation", source)
            offset = 0 if ends_epoch else source.offset_after(offset, num_steps)
            if steps_left is None or (num_steps == 0 and not batches.is_exhausted):
                break
            steps_left -= num_steps
        return offset

    @contextlib.contextmanager
    def _reading(
        self, source: BatchSource, offset: int = 0, limit: int | None = None
    ) -> Iterator[_EvaluationBatches]:
        """Return a context for evaluating batches of a source, with these batches."""
        train_state, source_batches = self._train_state, source.read(0, offset, limit)
        train_state.check_undamaged()
        self.batches = batches = _EvaluationBatches(source_batches, self._control, limit)
        train_state.meters = None
        try:
            # A worker that has fewer batches may have to wait at the end of the context.
            with train_state.evaluating():
                yield batches
            # Compare the samples of iterable data, if every worker has read all of its batches.
            is_compared = source.compares_samples and train_state.context.world_size > 1
            is_exhausted, collectives = int(batches.is_exhausted), train_state.collectives
            if is_compared and collectives.all_reduce_min(is_exhausted)[0]:
                source.check_same_samples(collectives)
        except BaseException:
            self._control.failure_place = batches.describe_position()
            source.end_processes()
            raise
        finally:
            self.batches = None

    def _source_of(self, loader: Any) -> BatchSource:
        if callable(loader) and not isinstance(loader, Iterable):
            loader = loader(self._operator.config)
        return self._train_state.data.wrap_argument(loader)

    def predict(self, loader: Any) -> list[tuple[int, Any]]:
        """Return a sort key and the predictions, on the CPU, for each batch of this worker.

        The keys sort the batches of all workers into the order of the loader.
        """
        train_state, operator = self._train_state, self._operator
        source = self._source_of(loader)
        if source.shuffles:
            raise ValueError(
                "predict(): the loader shuffles, so results would have no order. Pass a loader "
                "with shuffle=False, and without a sampler that draws random numbers."
            )
        if source.steps_left(0) == 0:
            raise empty_loader_error("given", source)
        source.agree_on_order(0, 0, train_state.collectives)
        context, predictions = train_state.context, []
        with self._reading(source) as batches, operator._eval_mode():
            for index, batch in enumerate(batches):
                info = operator._batch_info(None, index, iterator=batches)
                output = operator.predict_batch(batch, info)
                check_rows(output, info[NUM_SAMPLES], train_state.num_rows(batch))
                key = batches.group_step * context.world_size + context.world_rank
                predictions.append((key, train_state.to_cpu(output)))
        source.end_processes()
        return predictions

    def sanity_check(self, request: ValidateRequest) -> Mapping[str, Any] | None:
        """Validate some batches, restore the state, and return the metrics.

        Return None if reading a loader early would lose batches.
        """
        train_state = self._train_state
        source = train_state.data.source_or_missing("validation")
        if isinstance(source.loader, Iterator):
            return None
        with preserving_attributes(self._recorder), train_state.preserving_state(self._operator):
            metrics = self.validate(request)
        source.end_processes()
        return metrics


@dataclass(eq=False, repr=False)
class _EvaluationBatches(Iterator[Any]):
    """An iterator that counts its batches and can be interrupted."""

    source_batches: Iterator[SourceBatch]
    control: LoopControl
    total_steps: int | None = None  # None if unknown
    num_finished_steps: int = 0
    group_step: int = 0  # of the newest batch
    is_exhausted: bool = False
    batch: Any = None
    num_collated_samples: int | None = None  # its samples, if known

    def describe_position(self) -> str:
        """Return the number of the batch in progress, and the batch, as text."""
        if self.batch is None:
            return f"when reading batch {self.num_finished_steps + 1}"
        return f"in batch {self.num_finished_steps}, {describe(self.batch)}"

    def __next__(self) -> Any:
        self.control.raise_if_interrupted()
        self.batch = None
        try:
            source_batch: SourceBatch = self.control.next_batch(self.source_batches)
        except StopIteration:
            self.is_exhausted = True
            raise
        self.batch = source_batch.content
        self.num_collated_samples = source_batch.num_collated_samples
        own, of_group = self.num_finished_steps, source_batch.group_step
        self.group_step = own if of_group is None else of_group
        self.num_finished_steps += 1
        return self.batch
