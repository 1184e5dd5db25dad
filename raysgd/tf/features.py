"""Features of training steps: `ReplicaSync`, and `KerasOptimization` with averages of weights."""

import contextlib
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from raysgd.errors import ReplicasDifferError
from raysgd.loop.differences import cpu_model, differing, digest_of, format_values, minority_of
from raysgd.loop.feature import UpdateFeature
from raysgd.loop.loss_weights import LossCount
from raysgd.loop.update import Update
from raysgd.tf.state_access import KerasStateAccess
from raysgd.tf.train_state import KerasTrainState, learning_rate_of

_COMPARED_EVERY = 100
"""Steps after which the end of a call compares the values of all replicas."""


class ReplicaSync(UpdateFeature):
    """Copies the state at the start, averages statistics after each call, and compares replicas.

    Each update compares what the workers train. Values are compared only after a change of the
    group or by user code, before a save, and at most every 100 steps.
    """

    def __init__(self, train_state: KerasTrainState) -> None:
        self._train_state = train_state
        self._num_unchecked = _COMPARED_EVERY  # steps since the last comparison

    def sync_initial_state(self) -> None:
        KerasStateAccess(self._train_state).copy_from(0, follows=True)

    def after_user_function(self) -> None:
        self._num_unchecked = _COMPARED_EVERY

    begin_generation = after_user_function

    def begin_call(self, logs_steps: bool) -> None:
        self._train_state.accept_changes()
        self._compare()

    def commit(self, update: Update) -> None:
        self._num_unchecked += 1

    def end_epoch(self, epoch: int) -> None:
        # Workers with more batches raise an error, and do not wait.
        _check_same_update(self._train_state)

    def before_export(self) -> None:
        self._compare(after=1)

    def _compare(self, after: int = _COMPARED_EVERY) -> None:
        """Raise an error if weights or optimizers differ between workers with equal CPUs."""
        train_state = self._train_state
        if self._num_unchecked < after or train_state.collectives.size == 1:
            return
        weights = [(v, v.trainable) for model in train_state.models for v in model.weights]
        states = [(v, True) for optimizer in train_state.optimizers for v in optimizer.variables]
        digests = {
            f"value {n} of {v.path}": zlib.crc32(v.numpy().tobytes()) if is_trained else "frozen"
            for n, (v, is_trained) in enumerate(weights + states)
        }
        _compare_workers(train_state, {**digests, "CPU": cpu_model()})
        self._num_unchecked = 0

    def sync_buffers(self) -> None:
        """Average non-trainable variables, such as batch statistics, over the ranks."""
        self._compare()
        collectives = self._train_state.collectives
        if collectives.size == 1:
            return
        models = self._train_state.models
        kept = [v.value for model in models for v in model.non_trainable_variables]
        if floats := [variable for variable in kept if variable.dtype.is_floating]:
            # In float32, a mean of three equal numbers can differ from them.
            means = collectives.all_reduce_mean([tf.cast(each, tf.float64) for each in floats])
            for variable, mean in zip(floats, means, strict=True):
                variable.assign(tf.cast(mean, variable.dtype))


class KerasOptimization(UpdateFeature):
    """Accumulates gradients of micro-batches, averages them over the workers, and updates.

    If a step of the loop makes several updates, this feature copies the variables before each,
    because a later one may fail. It copies learning rates, which `train_batch` may change, always.
    """

    def __init__(self, train_state: KerasTrainState) -> None:
        self._train_state = train_state
        rates = map(learning_rate_of, train_state.optimizers)
        self._rates = [(rate, rate.value) for rate in rates if rate is not None]
        self._accumulated: dict[int, list[Any]] = {}
        self._copies: dict[int, tuple[Any, Any]] = {}

    def begin_update(self, update: Update) -> None:
        self._rates = [(rate, tf.identity(rate.value)) for rate, _ in self._rates]

    def begin_micro_batch(self, update: Update) -> None:
        if update.loss_weights.num_earlier_micro_batches < update.micro_batch_index:
            why = "train_batch does not call self.minimize()"
            self._train_state.micro_batching.refuse_split(why)

    def step(self, optimizer: Any, gradients: list[Any], variables: list[Any]) -> None:
        """Average gradients over workers and update, or add them up until the last micro-batch."""
        collectives, update = self._train_state.collectives, self._train_state.update
        if update.optimizer_steps.requested:
            why = "train_batch calls self.minimize() several times"
            self._train_state.micro_batching.refuse_split(why)
        update.optimizer_steps.request(optimizer)
        factors = update.loss_weights.add(LossCount(), collectives.size)
        assert factors.earlier == 1.0  # without counted items, the planned total is exact
        if (weight := factors.loss) != 1.0:
            gradients = [g if g is None else g * tf.constant(weight, g.dtype) for g in gradients]
        if not update.has_one_micro_batch:
            earlier = self._accumulated.get(id(optimizer))
            gradients = gradients if earlier is None else list(map(_add, earlier, gradients))
            self._accumulated[id(optimizer)] = gradients
        if not update.in_last_micro_batch:
            return
        lacks_gradient = any(gradient is None for gradient in gradients)
        if _check_same_update(self._train_state, variables, lacks_gradient):  # of any worker
            gradients = collectives.fill_missing(gradients, variables)
        pairs = [(g, v) for g, v in zip(gradients, variables, strict=True) if g is not None]
        means = collectives.all_reduce_mean([gradient for gradient, _ in pairs])
        changed = [variable for _, variable in pairs]
        if update.is_open and update.optimizer_steps.need_backup:
            for variable in [*changed, *optimizer.variables]:
                self._copies.setdefault(id(variable), (variable, tf.identity(variable.value)))
        update.optimizer_steps.begin(optimizer)
        self._train_state.graphs.apply(optimizer, means, changed)
        update.optimizer_steps.end(optimizer)

    def commit(self, update: Update) -> None:
        self._accumulated, self._copies = {}, {}

    def roll_back(self, update: Update) -> None:
        rates = self._rates if update.is_open else []
        for variable, value in (*self._copies.values(), *rates):
            variable.assign(value)
        steps = update.optimizer_steps
        if not self._copies and (steps.counts or steps.running_optimizer is not None):
            self._train_state.is_damaged = True
        self._accumulated, self._copies = {}, {}

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Evaluate with the averaged weights of ``use_ema``, like ``fit()``."""
        saved_values = []
        for optimizer in self._train_state.optimizers:
            inner = getattr(optimizer, "inner_optimizer", optimizer)
            if getattr(inner, "use_ema", False) and int(inner.iterations) > 0:
                variables = inner._trainable_variables  # also those that are frozen now
                saved_values += [(v, tf.identity(v.value)) for v in variables]
                optimizer.finalize_variable_values(variables)
        try:
            yield
        finally:
            for variable, value in saved_values:
                variable.assign(value)


def _add(left: Any, right: Any) -> Any:
    if left is None or right is None:
        return right if left is None else left
    return left + right


# ---- comparison of the replicas


def _check_same_update(
    train_state: KerasTrainState, variables: Sequence[Any] = (), flag: bool = False
) -> bool:
    """Raise an error unless all workers train the same variables, and have read the same samples.

    Every worker must call this. Return whether any of them has the flag.
    """
    if train_state.collectives.size == 1:
        return False
    models, cache = train_state.models, train_state.graphs.cache
    trained = cache(lambda: _describe_variables(models, variables), *variables)
    contents = {
        "the samples that they have read": train_state.data.training_source.step_digest,
        "what they train": trained,
    }
    return _compare_workers(train_state, contents, flag)


def _describe_variables(models: Sequence[Any], variables: Sequence[Any]) -> str:
    """Describe variables by their number in the models, because names may differ."""
    numbers = {id(v): n for n, v in enumerate(v for model in models for v in model.weights)}
    return ", ".join(f"variable {numbers.get(id(v))} {tuple(v.shape)}" for v in variables)


def _compare_workers(
    train_state: KerasTrainState, contents: dict[str, Any], flag: bool = False
) -> bool:
    """Raise an error if contents differ between workers. Return whether any has the flag."""
    values = [*contents.values()]  # names may differ between processes
    digest = digest_of(values)
    smallest, of_inverse, found = train_state.collectives.all_reduce_min(digest, ~digest, -flag)
    if smallest == ~of_inverse:
        return bool(found)
    size = train_state.collectives.size
    reports = [train_state.collectives.broadcast(lambda: values, rank) for rank in range(size)]
    differences = differing([dict(zip(contents, each, strict=False)) for each in reports])
    if differences.keys() == {"CPU"}:
        return False
    names = [f"{name} ({format_values(values)})" for name, values in differences.items()]
    message = (
        f"After step {train_state.position.global_step}, the workers differ in: "
        f"{'; '.join(names[:5])}. Common causes: code that changes them on one worker only; data "
        "of other lengths, or in other orders, such as deterministic=False, shuffles without a "
        "seed, names from a set, and random changes in a parallel map; data that each worker "
        "selects itself, without TFTrainer(add_dist_sampler=False). Correct the cause, and load a "
        "checkpoint or the state of worker 0: trainer.load_state_dict(trainer.state_dict())."
    )
    if "CPU" in differences:
        train_state.settings.warn_once("cpus", "%s Or rounding: their CPUs differ.", message)
        return False
    raise ReplicasDifferError(message, ranks=minority_of(differences, size))
