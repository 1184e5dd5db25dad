"""Helpers that make the calls of a trainer in one line."""

import dataclasses

from raysgd._internal.runner import Request
from raysgd.elastic.call import Call, LoadRequest
from raysgd.loop.requests import TrainRequest

OPTIONS = {field.name for field in dataclasses.fields(Call)}


@dataclasses.dataclass(frozen=True)
class NamedRequest(Request):
    """A request that calls a method of a fake runner."""

    method: str
    arguments: dict = dataclasses.field(default_factory=dict)

    @property
    def name(self):
        return self.method

    def send_to(self, runner):
        return getattr(runner, self.method)(**self.arguments)


def request_of(method, **arguments):
    if method == "train":
        return TrainRequest(call_number=0, **arguments)
    if method == "load":
        return LoadRequest(**arguments)
    return NamedRequest(method, arguments)


def run(controller, method, **given):
    """Run a call, and store it as ``run.call``. The request gets the options that `Call` lacks."""
    options = {name: value for name, value in given.items() if name in OPTIONS}
    arguments = {name: value for name, value in given.items() if name not in OPTIONS}
    run.call = Call(
        request=request_of(method, **arguments),
        has_batches=method in ("train", "validate"),
        can_pause=method == "train",
        **options,
    )
    return controller.run(run.call)
