"""The command ``raysgd fit``: an operator, its config, and a trainer that goes on where it was."""

from __future__ import annotations

import difflib
import importlib
import inspect
import json
import logging
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from raysgd.callbacks import CheckpointCallback, History
from raysgd.callbacks.values import json_dict
from raysgd.config import BATCH_SIZE
from raysgd.trees import map_leaves

__all__ = ["fit", "load_operator", "read_settings", "trainer_of"]

_logger = logging.getLogger(__name__)
_SECTIONS = ("config", "trainer", "fit")
_SET_HERE = ("training_operator_cls", "config", "callbacks")
_EXPONENT = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+")


def load_operator(place: str) -> type[Any]:
    """Import a class, from ``package.module:Class`` or ``path/to/file.py:Class``.

    Raises:
        ValueError: if there is none.
    """
    module, _, name = place.rpartition(":")
    if not module or not name.isidentifier():
        raise ValueError(f"{place!r}: must be package.module:Operator, or file.py:Operator.")
    folder = Path.cwd()
    if module.endswith(".py"):
        folder, module = Path(module).absolute().parent, Path(module).stem
    # workers on this machine look for it where this process does
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    sys.path.insert(0, str(folder))
    try:
        found = getattr(importlib.import_module(module), name, None)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # one that it imports itself
        raise ValueError(f"{place!r}: there is no module {error.name!r} in {folder}.") from error
    if not isinstance(found, type):
        raise ValueError(f"{place!r}: {module} has no class {name}.")
    return found


def read_settings(path: Path | None, overrides: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Read the arguments of operator, trainer and ``fit`` from a file, and change them one by one.

    >>> read_settings(None, ["config.lr=1e-3", "config.model.depth=2", "fit.num_epochs=5"])
    {'config': {'lr': 0.001, 'model': {'depth': 2}}, 'trainer': {}, 'fit': {'num_epochs': 5}}

    Args:
        path: of YAML or JSON, with the keys ``config``, ``trainer`` and ``fit``.
        overrides: such as ``config.lr=0.1``; what is no YAML is a text.

    Raises:
        ValueError: if one of them is something else.
    """
    import yaml

    text = "" if path is None else path.read_text(encoding="utf-8")
    try:
        given = map_leaves(yaml.safe_load(text) or {}, _number)
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is no YAML: {error}") from error
    sections = given if isinstance(given, dict) else {str(given): None}
    for name, below in sections.items():
        if name not in _SECTIONS or not isinstance(below, dict | None):
            raise ValueError(
                f"{path} has {name!r}: it must have no keys but {', '.join(_SECTIONS)}, with keys "
                "below."
            )
    settings: dict[str, dict[str, Any]] = {name: given.get(name) or {} for name in _SECTIONS}
    for override in overrides:
        place, is_set, value = override.partition("=")
        section, *keys = place.split(".")
        if not is_set or section not in _SECTIONS or not all(keys) or not keys:
            raise ValueError(
                f"{override!r}: must be config.NAME=VALUE, trainer.NAME=VALUE or fit.NAME=VALUE."
            )
        held: Any = settings[section]
        for key in keys[:-1]:
            held = held.setdefault(key, {}) if isinstance(held, dict) else None
        if not isinstance(held, dict):
            raise ValueError(f"{override!r}: {place.rpartition('.')[0]} has a value, and no keys.")
        try:
            held[keys[-1]] = map_leaves(yaml.safe_load(value), _number)
        except yaml.YAMLError:
            held[keys[-1]] = value
    if "BATCH_SIZE" in settings["config"]:
        settings["config"][BATCH_SIZE] = settings["config"].pop("BATCH_SIZE")
    return settings


def _number(leaf: Any) -> Any:
    """Return what YAML takes for a text, and everybody else for a number, as one."""
    return float(leaf) if isinstance(leaf, str) and _EXPONENT.fullmatch(leaf) else leaf


def trainer_of(operator_cls: type[Any], settings: dict[str, dict[str, Any]]) -> type[Any]:
    """Return the trainer of an operator.

    Raises:
        ValueError: if the settings have an argument that the trainer, or its ``fit``, does not.
    """
    from raysgd.tf.operator import TrainingOperator as KerasOperator

    name = "raysgd.tf" if issubclass(operator_cls, KerasOperator) else "raysgd.torch"
    module = importlib.import_module(name)
    trainer_cls: type[Any] = module.TFTrainer if name == "raysgd.tf" else module.TorchTrainer
    for section, method in (("trainer", trainer_cls), ("fit", trainer_cls.fit)):
        all_of_them = inspect.signature(method).parameters.values()
        known = [each.name for each in all_of_them if each.kind is not each.VAR_KEYWORD]
        for given in settings[section]:
            if section == "trainer" and given in _SET_HERE:
                raise ValueError(f"trainer.{given}: raysgd fit sets this by itself.")
            if given not in known:
                meant = difflib.get_close_matches(given, known, n=1)
                raise ValueError(
                    f"{section}.{given}: there is no such argument."
                    + f" Did you mean {section}.{meant[0]}?" * bool(meant)
                )
    return trainer_cls


def fit(
    trainer_cls: type[Any], operator_cls: type[Any], settings: dict[str, dict[str, Any]]
) -> History:
    """Train an operator, with checkpoints in the run folder, from the newest of them on."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    arguments = {"logdir": f"runs/{operator_cls.__name__}", **settings["trainer"]}
    if "runtime_resources" in Path(arguments["logdir"]).absolute().parts:
        _logger.warning(
            "The run folder %s is in the copy of your code that Ray made for this job, and is gone "
            "with it: give --logdir the full path of a folder that all nodes see.",
            arguments["logdir"],
        )
    with trainer_cls(
        training_operator_cls=operator_cls,
        config=settings["config"],
        callbacks=[CheckpointCallback()],
        **arguments,
    ) as trainer:
        history: History = trainer.fit(**settings["fit"])
        for metrics in history[-1:]:
            print(json.dumps(json_dict(metrics)))
    return history
