"""The command ``raysgd fit``: train an operator, or resume its training."""

from __future__ import annotations

import importlib
import inspect
import json
import logging
import os
import re
import sys
import traceback
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from raysgd._internal.arguments import closest
from raysgd._internal.config import BATCH_SIZE
from raysgd._internal.nested import map_leaves
from raysgd._internal.tracebacks import is_the_users, is_wanted, shortened_text
from raysgd.callbacks import CheckpointCallback, History
from raysgd.callbacks.values import json_dict
from raysgd.errors import CallbackError, CheckpointError, RaySGDError, RemoteTraceback

_SECTIONS = ("config", "trainer", "fit", "checkpoint")
_SET_HERE = ("training_operator_cls", "config", "callbacks")
_EXPONENT = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+")


def load_operator(place: str) -> type[Any]:
    """Import a class from ``package.module:Class`` or ``path/to/file.py:Class``."""
    module, _, name = place.rpartition(":")
    if not module or not name.isidentifier():
        raise ValueError(f"{place!r}: must be package.module:Operator or file.py:Operator.")
    folder = Path.cwd()
    if module.endswith(".py"):
        file = Path(module).absolute()
        folder, module = file.parent, file.stem
        if not file.is_file():
            raise ValueError(f"{place!r}: there is no file {file.name} in {folder}.")
    # Workers on this machine must find the module too.
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    sys.path.insert(0, str(folder))
    try:
        imported = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # a missing import of the module itself
        raise ValueError(f"{place!r}: there is no module {error.name!r} in {folder}.") from error
    found = getattr(imported, name, None)
    if not isinstance(found, type):
        classes = [key for key, value in vars(imported).items() if isinstance(value, type)]
        raise ValueError(f"{place!r}: {module} has no class {name}." + _suggestion(name, classes))
    return found


def _suggestion(given: str, known: Collection[str], before: str = "") -> str:
    """Return a "did you mean" question with a similar name, or an empty string."""
    close = closest(given, known)
    return f" Did you mean {before}{close}?" if close else ""


def read_settings(path: Path | None, overrides: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Read the settings of all sections from a file, and apply overrides.

    >>> found = read_settings(None, ["config.lr=1e-3", "config.net.depth=2", "fit.max_steps=5"])
    >>> found["config"], found["fit"]
    ({'lr': 0.001, 'net': {'depth': 2}}, {'max_steps': 5})

    The YAML or JSON file has a dict for each section. Values that are not valid YAML are strings.
    """
    import yaml

    try:
        text = "" if path is None else path.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"Cannot read --config {path}: {error.strerror}.") from error
    try:
        given = map_leaves(yaml.safe_load(text) or {}, _number)
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not valid YAML: {error}") from error
    sections = given if isinstance(given, dict) else {str(given): None}
    for name, below in sections.items():
        if name not in _SECTIONS or not isinstance(below, dict | None):
            raise ValueError(
                f"{path} has the key {name!r}. It must have only {', '.join(_SECTIONS)}, each with "
                "keys of its own."
            )
    settings: dict[str, dict[str, Any]] = {name: given.get(name) or {} for name in _SECTIONS}
    for override in overrides:
        place, is_set, value = override.partition("=")
        section, *keys = place.split(".")
        if not is_set or section not in _SECTIONS or not all(keys) or not keys:
            raise ValueError(
                f"{override!r}: must be SECTION.NAME=VALUE. The sections are: "
                f"{', '.join(_SECTIONS)}."
            )
        held: Any = settings[section]
        for key in keys[:-1]:
            held = held.setdefault(key, {}) if isinstance(held, dict) else None
        if not isinstance(held, dict):
            above = place.rpartition(".")[0]
            raise ValueError(f"{override!r}: {above} is already a value, so it has no keys.")
        try:
            held[keys[-1]] = map_leaves(yaml.safe_load(value), _number)
        except yaml.YAMLError:
            held[keys[-1]] = value
    if "BATCH_SIZE" in settings["config"]:
        settings["config"][BATCH_SIZE] = settings["config"].pop("BATCH_SIZE")
    return settings


def _number(leaf: Any) -> Any:
    """Convert exponents such as 1e-3, which YAML reads as strings, to floats."""
    return float(leaf) if isinstance(leaf, str) and _EXPONENT.fullmatch(leaf) else leaf


def trainer_of(operator_cls: type[Any], settings: dict[str, dict[str, Any]]) -> type[Any]:
    """Return the trainer class of an operator, after checking the names in each section."""
    from raysgd.tf.operator import TrainingOperator as KerasOperator

    name = "raysgd.tf" if issubclass(operator_cls, KerasOperator) else "raysgd.torch"
    module = importlib.import_module(name)
    trainer_cls: type[Any] = module.TFTrainer if name == "raysgd.tf" else module.TorchTrainer
    takers = {"trainer": trainer_cls, "fit": trainer_cls.fit, "checkpoint": CheckpointCallback}
    for section, method in takers.items():
        all_of_them = inspect.signature(method).parameters.values()
        known = [each.name for each in all_of_them if each.kind is not each.VAR_KEYWORD]
        for given in settings[section]:
            if section == "trainer" and given in _SET_HERE:
                raise ValueError(f"trainer.{given}: raysgd fit sets this argument. Leave it out.")
            if given not in known:
                raise ValueError(
                    f"{section}.{given}: there is no such argument."
                    + _suggestion(given, known, f"{section}.")
                )
    return trainer_cls


def fit(
    trainer_cls: type[Any], operator_cls: type[Any], settings: dict[str, dict[str, Any]]
) -> History:
    """Train an operator with checkpoints in the run folder. Resume from the newest one."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    arguments = {"logdir": f"runs/{operator_cls.__name__}", **settings["trainer"]}
    with trainer_cls(
        training_operator_cls=operator_cls,
        config=settings["config"],
        callbacks=[CheckpointCallback(**settings["checkpoint"])],
        **arguments,
    ) as trainer:
        history: History = trainer.fit(**settings["fit"])
        if history:
            print(json.dumps(json_dict(history[-1])))
    return history


def message_of(error: Exception) -> tuple[str, int]:
    """Return the message and the exit status. Errors of arguments have no traceback."""
    if not is_wanted():
        return "".join(traceback.format_exception(error)), 1
    if isinstance(error, CallbackError) and isinstance(error.__cause__, CheckpointError):
        return f"{error.__cause__} (Use another --logdir.)", 1
    trace = error.__traceback__
    is_refused = (
        isinstance(error, OSError | TypeError | ValueError)
        and not isinstance(error, RaySGDError)
        and not isinstance(error.__cause__, RemoteTraceback)
        and not getattr(error, "__notes__", ())  # training adds notes
        and not any(is_the_users(each.filename) for each in traceback.extract_tb(trace))
    )
    if is_refused:
        return str(error), 2
    # Skip the two frames of the command itself.
    inner = trace.tb_next.tb_next if trace and trace.tb_next else trace
    text = "".join(traceback.format_exception(type(error), error, inner))
    return shortened_text(text).rstrip(), 1
