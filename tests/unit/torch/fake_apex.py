"""A stand-in for NVIDIA Apex, which needs a GPU and a compiler to install.

It implements the functions of ``apex.amp`` that raysgd calls, as Apex documents them. The loss
scale is dynamic. The context of ``scale_loss`` unscales the gradients at its end, unless
``delay_unscale`` is set. After an overflow, the optimizers skip their next ``step``.
"""

import contextlib
import sys
import types

import torch


def install(monkeypatch, scale=2.0**16):
    """Install the stand-in as the module ``apex.amp``, and return it."""
    package, amp = types.ModuleType("apex"), Amp("apex.amp", scale)
    package.amp = amp
    monkeypatch.setitem(sys.modules, "apex", package)
    monkeypatch.setitem(sys.modules, "apex.amp", amp)
    return amp


class Amp(types.ModuleType):
    def __init__(self, name, scale):
        super().__init__(name)
        self.scale, self.unskipped = scale, 0
        self.calls = []

    def initialize(self, models, optimizers, **arguments):
        self.calls.append(("initialize", arguments))
        self.models, self.optimizers = models, optimizers
        return models, optimizers

    @contextlib.contextmanager
    def scale_loss(self, loss, optimizers, delay_unscale=False):
        self.calls.append(("scale_loss", delay_unscale))
        yield loss.float() * self.scale
        if not delay_unscale:
            self._unscale(optimizers)

    def _unscale(self, optimizers):
        gradients = [p.grad for o in optimizers for p in self.master_params(o)]
        gradients = [g for g in gradients if g is not None]
        for gradient in gradients:
            gradient /= self.scale
        if all(torch.isfinite(g).all() for g in gradients):
            self.unskipped += 1
            return
        self.scale, self.unskipped = self.scale / 2, 0
        for optimizer in optimizers:
            self._skip_next_step(optimizer)

    def _skip_next_step(self, optimizer):
        real = optimizer.step

        def skip(closure=None):
            optimizer.step = real

        optimizer.step = skip

    def master_params(self, optimizer):
        for group in optimizer.param_groups:
            yield from group["params"]

    def state_dict(self):
        return {"loss_scaler0": {"loss_scale": self.scale, "unskipped": self.unskipped}}

    def load_state_dict(self, state):
        self.scale = state["loss_scaler0"]["loss_scale"]
        self.unskipped = state["loss_scaler0"]["unskipped"]
