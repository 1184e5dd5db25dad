"""Calls as the trainers make them, in one line."""

import dataclasses

from raysgd.cluster.call import Call

OPTIONS = {field.name for field in dataclasses.fields(Call)}


def run(controller, method, **given):
    """Run a call, kept as ``run.call``; what is no option of `Call` is the method's argument."""
    options = {name: value for name, value in given.items() if name in OPTIONS}
    arguments = {name: value for name, value in given.items() if name not in OPTIONS}
    has_batches = method in ("train", "validate")
    run.call = Call(
        method=method,
        arguments=arguments,
        has_batches=has_batches,
        can_pause=method == "train",
        **options,
    )
    return controller.run(run.call)
