"""Trials of Ray Tune that train with a TFTrainer."""

from collections.abc import Mapping
from typing import Any

from raysgd.tf.trainer import TFTrainer
from raysgd.trials import BaseTrainable


class TFTrainable(BaseTrainable):
    """A trial of an older script, which passes this class to Tune.

    The config of the trial has the arguments of the trainer (``model_creator``, ``data_creator``,
    ``num_replicas``, ``use_gpu``, ``num_cpus_per_worker``, ``use_local``), and as
    ``trainer_config`` the config of the two functions.
    """

    trainer_cls = TFTrainer

    @classmethod
    def trainer_arguments(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        names = ("model_creator", "data_creator", "use_gpu", "num_cpus_per_worker", "use_local")
        return {
            **cls.defaults,
            **{name: config[name] for name in names if name in config},
            "num_workers": config.get("num_replicas", 1),
            "config": config.get("trainer_config"),
        }
