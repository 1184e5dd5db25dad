"""What does not work together. Trainers check it first, and ``register`` and callbacks later."""

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch

from raysgd.torch.modules import is_compiled, is_ddp


def check(
    strategy: str,
    caller: str,
    options: Any,
    models: Sequence[torch.nn.Module] = (),
    ddp_args: Mapping[str, Any] | None = None,
    scales_loss: bool = False,
) -> None:
    """Raise ValueError if a strategy does not work with something else that user code has chosen.

    Args:
        strategy: a key of `STRATEGIES` with rows here.
        caller: what has chosen the strategy.
        options: of the trainer.
        models: the registered models, if any.
        ddp_args: the argument of ``register``.
        scales_loss: whether the precision does so.
    """
    exact, full, sharding = ("equal bits",), ("full",), ("optimizer", "full")
    every = (*exact, *sharding)
    float16 = "the scaled gradients of float16, and works with amp_dtype=torch.bfloat16"
    measured = 'ElasticConfig(shares="measured"), but with a mapping of shares'
    scaled_batch = 'ElasticConfig(global_batch="scale")'
    conflicts = [
        # what does not work with strategies  the strategies      whether it is given
        ('backend="horovod"', every, options.use_horovod),
        ('use_fp16="apex"', every, options.use_fp16 == "apex"),
        ("wrap_ddp=False", every, not options.wrap_ddp),
        ("TorchTrainer(exact=...)", sharding, options.exact is not None),
        ("add_dist_sampler=False", exact, not options.add_dist_sampler),
        (scaled_batch, exact, options.elastic.global_batch != "keep"),
        (measured, full, options.elastic.shares == "measured"),
        ("DistributedDataParallel(model)", (*exact, *full), any(map(is_ddp, models))),
        ("torch.compile", full, any(map(is_compiled, models))),
        ("register(ddp_args=...)", full, ddp_args),
        (float16, full, scales_loss),
    ]
    for other, strategies, is_given in conflicts:
        if is_given and strategy in strategies:
            refuse(caller, other)


def refuse(caller: str, other: str) -> NoReturn:
    raise ValueError(f"{caller} does not work with {other}. Leave out one of the two.")
