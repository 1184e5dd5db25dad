"""Callbacks for tests: they record their calls, fail, or add metrics."""

from raysgd.callbacks import Callback


class Scripted(Callback):
    """A callback that adds a metric in a hook, by default to validations, one value per epoch."""

    order = -1

    def __init__(self, values, name="score", hook="on_validation_end"):
        self._values, self._name = values, name
        setattr(self, hook, self.add)

    def add(self, trainer, metrics):
        metrics[self._name] = self._values[trainer.epoch - 1]


class Spy(Callback):
    """A callback that appends ``(name, hook, detail)`` to a list, which spies can share."""

    def __init__(self, name="spy", calls=None, fail_in=(), pause_every=None, state=None):
        self.name = name
        self.calls = [] if calls is None else calls
        self.fail_in = fail_in
        self.pause_every = pause_every
        self.state = state or {}
        self.loaded = []

    def note(self, hook, detail=None):
        self.calls.append((self.name, hook, detail))
        if hook in self.fail_in:
            raise KeyError(f"{self.name} fails")

    @property
    def hooks(self):
        return [hook for name, hook, _ in self.calls if name == self.name]

    def on_train_start(self, trainer):
        self.note("on_train_start", trainer.epoch)

    def on_train_end(self, trainer):
        self.note("on_train_end", trainer.epoch)

    def on_epoch_end(self, trainer, metrics):
        self.note("on_epoch_end", metrics["epoch"])

    def on_partial_epoch_end(self, trainer, metrics):
        self.note("on_partial_epoch_end", trainer.global_step)

    def on_validation_end(self, trainer, metrics):
        self.note("on_validation_end", metrics["num_samples"])

    def on_epoch_result(self, trainer, call, metrics):
        assert metrics.get("epoch", trainer.epoch) == trainer.epoch

    def on_event(self, trainer, event):
        self.note("on_event", event.kind)

    def on_exception(self, trainer, error):
        self.note("on_exception", type(error).__name__)

    def next_pause(self, global_step):
        every = self.pause_every
        return None if every is None else (global_step // every + 1) * every

    def on_pause(self, trainer):
        self.note("on_pause", trainer.global_step)

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.loaded.append(state)


class Late(Spy):
    """A spy that is called after the others."""

    order = 1


class Unloadable(Spy):
    """A spy that cannot load its state until ``mended`` is set."""

    mended = False

    def load_state_dict(self, state):
        if not self.mended:
            raise KeyError("best")
        super().load_state_dict(state)
