"""The command ``raysgd fit``: train an operator, or resume its training."""

import functools
import importlib
import inspect
import json
import logging
import os
import re
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from raysgd._internal.arguments import unknown_argument
from raysgd._internal.config import BATCH_SIZE
from raysgd._internal.nested import map_leaves
from raysgd._internal.tracebacks import is_user_file
from raysgd._internal.values import to_json_dict
from raysgd.callbacks import CheckpointCallback
from raysgd.errors import RaySGDError

_SECTIONS = ("config", "trainer", "fit", "checkpoint")
_EXPONENT = re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+\Z")


def load_operator(target: str) -> type[Any]:
    """Import a class from ``package.module:Class`` or ``path/to/file.py:Class``."""
    module, _, name = target.rpartition(":")
    malformed = ValueError(f"{target!r}: must be package.module:Operator or file.py:Operator.")
    if not module or not name:
        raise malformed
    folder, file = Path.cwd(), None
    if module.endswith(".py"):
        file = Path(module).absolute()
        if not file.is_file():
            raise FileNotFoundError(f"{file} does not exist.")
        folder, module = file.parent, file.stem
    # Workers on this machine must find the module too.
    folders = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(folders)
    sys.path.insert(0, str(folder))
    imported = importlib.import_module(module)
    if file and Path(getattr(imported, "__file__", None) or "").resolve() != file.resolve():
        raise ValueError(f"{file}: {module!r} is also the name of another module. Rename the file.")
    operator_cls: Any = functools.reduce(getattr, name.split("."), imported)
    if not isinstance(operator_cls, type):
        raise malformed
    return operator_cls


def read_settings(path: Path | None, overrides: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Read the settings of all sections from a file, and apply overrides.

    >>> overrides = ["config.lr=1e-3", "config.net.depth=2", "fit.max_steps=5"]
    >>> settings = read_settings(None, overrides)
    >>> settings["config"], settings["fit"]
    ({'lr': 0.001, 'net': {'depth': 2}}, {'max_steps': 5})

    The YAML or JSON file has a dict for each section. Values that are not valid YAML are strings,
    unless they begin like a list, a dict, or a quoted string.
    """
    try:
        content = {} if path is None else _parse(path.read_text(encoding="utf-8")) or {}
    except (ValueError, RecursionError) as error:  # also if the text is not in UTF-8
        raise ValueError(f"{path} is not valid YAML: {error}") from error
    sections = content if isinstance(content, dict) else {str(content): content}
    for name, below in sections.items():
        if name not in _SECTIONS or not isinstance(below, dict | None):
            raise ValueError(
                f"{path} has the key {name!r}. It must have only {', '.join(_SECTIONS)}, each with "
                "keys of its own."
            )
    settings: dict[str, dict[str, Any]] = {name: content.get(name) or {} for name in _SECTIONS}
    for override in overrides:
        name, is_set, value = override.partition("=")
        section, *keys = name.split(".")
        if not is_set or section not in _SECTIONS or not all(keys) or not keys:
            raise ValueError(
                f"{override!r}: must be SECTION.NAME=VALUE. The sections are: "
                f"{', '.join(_SECTIONS)}."
            )
        values: Any = settings[section]
        for key in keys[:-1]:
            values = values.setdefault(key, {}) if isinstance(values, dict) else None
        if not isinstance(values, dict):
            above = name.rpartition(".")[0]
            raise ValueError(f"{override!r}: {above} is already a value, so it has no keys.")
        try:
            values[keys[-1]] = _parse(value)
        except (ValueError, RecursionError) as error:
            if value.lstrip().startswith(("[", "{", "'", '"', "&")):
                raise ValueError(f"{override!r} is not valid YAML: {error}") from error
            values[keys[-1]] = value
    if "BATCH_SIZE" in settings["config"]:
        settings["config"][BATCH_SIZE] = settings["config"].pop("BATCH_SIZE")
    return settings


def _parse(text: str) -> Any:
    """Return the content of a YAML text. Raise ValueError if it is not valid, or repeats a key."""
    import yaml

    class UniqueKeys(yaml.SafeLoader):  # type: ignore[misc]
        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            keys = [key.value for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]
            if twice := [key for key in keys if keys.count(key) > 1]:
                raise ValueError(f"it has the key {twice[0]!r} twice{node.start_mark}")
            return super().construct_mapping(node, deep=True)  # finds recursive values

    # YAML 1.1 reads exponents such as 1e-3 as strings.
    UniqueKeys.add_implicit_resolver("tag:yaml.org,2002:float", _EXPONENT, [*"-+.0123456789"])
    try:
        return map_leaves(yaml.load(text, UniqueKeys), lambda leaf: leaf)  # aliases share nothing
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error


def fit(operator_cls: type[Any], settings: dict[str, dict[str, Any]]) -> None:
    """Train an operator with checkpoints in the run folder. Resume from the newest one."""
    from raysgd import TFTrainer, TorchTrainer
    from raysgd.tf import TrainingOperator as KerasOperator

    logging.basicConfig(level=logging.INFO, format="%(message)s")
    trainer_cls: type[Any] = TFTrainer if issubclass(operator_cls, KerasOperator) else TorchTrainer
    known = inspect.signature(trainer_cls.fit).parameters
    if unknown := settings["fit"].keys() - known.keys():  # check before workers start
        raise unknown_argument("fit", min(unknown), known)
    with trainer_cls(
        training_operator_cls=operator_cls,
        config=settings["config"],
        callbacks=[CheckpointCallback(**settings["checkpoint"])],
        **{"logdir": f"runs/{operator_cls.__name__}", **settings["trainer"]},
    ) as trainer:
        if history := trainer.fit(**settings["fit"]):
            print(json.dumps(to_json_dict(history[-1])))


def describe_error(error: Exception) -> tuple[str, int]:
    """Return the message and the exit status. Errors of arguments have no traceback."""
    is_refused = (
        isinstance(error, AttributeError | ImportError | OSError | TypeError | ValueError)
        and not isinstance(error, RaySGDError)
        and not getattr(error, "__notes__", ())  # training adds notes
        and not any(is_user_file(f.filename) for f in traceback.extract_tb(error.__traceback__))
    )
    if is_refused:
        return str(error), 2
    return "".join(traceback.format_exception(error)).rstrip(), 1
