"""The command ``raysgd``."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import psutil
import typer

import raysgd
from raysgd.comm.network import LOOPBACK, interfaces

__all__ = ["app"]

app = typer.Typer(
    help="Elastic distributed training on Ray.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

_PACKAGES = {
    "ray": "more than one worker",
    "pyarrow": 'Ray Tune and Ray Data: pip install "raysgd[tune,data]"',
    "torch": "TorchTrainer",
    "tensorflow": "TFTrainer",
    "horovod": 'backend="horovod"',
    "apex": 'use_fp16="apex"',
    "safetensors": "save_model",
    "torchmetrics": "metric collections in operators",
    "transformers": "operators for Hugging Face models",
    "tensorboard": "TensorBoard logs",
    "mlflow": "MLflow logs",
    "wandb": "Weights & Biases logs",
    "plotly": 'report.html: pip install "raysgd[callbacks]"',
}
_PEERS = ("lightning", "accelerate")
_NEEDS = {"all": (*_PEERS, "matplotlib"), "epoch": _PEERS, "start": _PEERS}
"""Packages that benchmarks need in addition to raysgd."""
_DISTRIBUTIONS = {
    "mlflow": ("mlflow", "mlflow-skinny"),
    "tensorflow": ("tensorflow", "tensorflow-cpu"),
}


_LISTENERS = (
    ("driver", "calls, rendezvous", "for those who know a key of the run"),
    ("each worker", "small reductions", "for those who know a key of the run"),
    ("each worker", "gloo, NCCL, Horovod", "for everybody who reaches them"),
    ("driver", "stores of NCCL and Horovod", "for everybody who reaches them"),
    ("each worker", "TensorFlow's server", "on all interfaces; training functions only"),
)
"""Where raysgd listens, for what purpose, and who can connect."""


@app.callback(invoke_without_command=True)
def main(
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False,
) -> None:
    """Elastic distributed training on Ray."""
    if version:
        typer.echo(f"raysgd {raysgd.__version__}")
        raise typer.Exit


@app.command()
def report(
    rundir: Annotated[Path, typer.Argument(help="Folder of the run: TorchTrainer(logdir=...).")],
) -> None:
    """Rebuild report.html of a run from its logs."""
    from raysgd.callbacks.report import make_report

    try:
        path = make_report(rundir)
    except (OSError, ValueError, ImportError) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from error
    typer.echo(path)


@app.command()
def fit(
    operator: Annotated[
        str, typer.Argument(help="The class: package.module:Operator, or file.py:Operator.")
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            help="config.lr=0.1, trainer.use_gpu=true, fit.max_steps=100, checkpoint.every=500 "
            "and the like."
        ),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(help="YAML or JSON with the keys config, trainer, fit and checkpoint."),
    ] = None,
    num_workers: Annotated[int | None, typer.Option(help="trainer.num_workers=...")] = None,
    num_epochs: Annotated[int | None, typer.Option(help="fit.num_epochs=...")] = None,
    logdir: Annotated[
        str | None,
        typer.Option(help="trainer.logdir=..., the run folder; runs/OPERATOR without."),
    ] = None,
) -> None:
    """Train an operator. Run the same command again to resume from the newest checkpoint."""
    from raysgd.cli import fit as fit_command

    try:
        settings = fit_command.read_settings(config, overrides or ())
        given = {"num_workers": num_workers, "logdir": logdir}
        settings["trainer"] |= {name: v for name, v in given.items() if v is not None}
        settings["fit"] |= {} if num_epochs is None else {"num_epochs": num_epochs}
        operator_cls = fit_command.load_operator(operator)
        trainer_cls = fit_command.trainer_of(operator_cls, settings)
        if not settings["fit"]:
            raise ValueError("raysgd fit: say for how long, by --num-epochs or fit.max_steps=….")
        fit_command.fit(trainer_cls, operator_cls, settings)
    except Exception as error:
        text, code = fit_command.message_of(error)
        typer.echo(text, err=True)
        raise typer.Exit(code) from error


@app.command()
def doctor(
    address: Annotated[
        str | None,
        typer.Option(
            envvar="RAY_ADDRESS",
            help="Address of a Ray cluster to ask, such as auto; without it none is.",
        ),
    ] = None,
) -> None:
    """Show the packages and resources of this machine and of a cluster."""
    rows = [("Python", platform.python_version(), ""), ("raysgd", raysgd.__version__, "")]
    rows += [(name, _version(name) or "missing", use) for name, use in _PACKAGES.items()]
    memory = psutil.virtual_memory()
    rows += [("CPUs here", str(psutil.cpu_count()), "")]
    rows += [("memory here", _gib(memory.total), f"{_gib(memory.available)} free")]
    rows += _torch_rows()
    _show(rows)
    typer.echo("\nWhat listens while several workers train (docs/security.md):")
    _show(_LISTENERS)
    own = next((each for each in interfaces() if each != LOOPBACK), LOOPBACK)
    typer.echo(f"on {LOOPBACK} where all are on this machine, else on an address such as {own}")
    if address == "local":  # connecting to it would start a cluster
        typer.echo("\nNo cluster to ask: with the address 'local' each script starts its own Ray.")
        return
    try:
        of_cluster = list(_cluster_rows(address))
    except Exception as error:  # also what Ray raises if it cannot connect
        typer.echo(f"No Ray cluster at {address!r}: {error}", err=True)
        raise typer.Exit(1) from error
    if of_cluster:
        typer.echo(f"\nRay cluster at {address}:")
        _show(of_cluster)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def bench(
    context: typer.Context,
    name: Annotated[
        str, typer.Argument(help="all, or one of them; options that follow are passed on to it.")
    ] = "all",
) -> None:
    """Run a benchmark of raysgd and its peers. Needs a clone of the repository."""
    folder = Path(raysgd.__file__).resolve().parent.parent / "examples" / "benchmarks"
    there_are = sorted(path.stem for path in folder.glob("[!_]*.py"))
    if not there_are:
        typer.echo(
            f"No benchmarks in {folder}: they come with a clone of the repository.", err=True
        )
        raise typer.Exit(1)
    if name not in there_are:
        typer.echo(f"raysgd bench {name}: must be one of {', '.join(there_are)}.", err=True)
        raise typer.Exit(2)
    missing = [need for need in _NEEDS.get(name, ()) if importlib.util.find_spec(need) is None]
    if missing:
        typer.echo(
            f"raysgd bench {name} needs {', '.join(missing)}: make bench installs them in an "
            "environment of their own.",
            err=True,
        )
        raise typer.Exit(1)
    command = [sys.executable, str(folder / f"{name}.py"), *context.args]
    raise typer.Exit(subprocess.run(command, check=False).returncode)


def _show(rows: Sequence[tuple[str, str, str]]) -> None:
    width = [max(len(row[column]) for row in rows) for column in (0, 1)]
    for name, found, use in rows:
        note = f"for {use}" if found == "missing" else use if name not in _PACKAGES else ""
        typer.echo(f"{name:{width[0]}}  {found:{width[1]}}  {note}".rstrip())


def _version(name: str) -> str | None:
    """Return the version of a package without importing it, or None if it is missing."""
    if importlib.util.find_spec(name) is None:
        return None
    for distribution in _DISTRIBUTIONS.get(name, (name,)):
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "unknown version"


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"


def _torch_rows() -> Iterator[tuple[str, str, str]]:
    if importlib.util.find_spec("torch") is None:
        return
    import torch
    import torch.distributed as dist

    cuda = torch.version.cuda
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    yield "CUDA", cuda or "missing", "GPUs" if cuda is None else ""
    yield "GPUs here", str(gpus), ", ".join(torch.cuda.get_device_name(i) for i in range(gpus))
    for name, there in (("gloo", dist.is_gloo_available()), ("nccl", dist.is_nccl_available())):
        yield name, "available" if there else "missing", "" if there else f'backend="{name}"'


def _cluster_rows(address: str | None) -> Iterator[tuple[str, str, str]]:
    if not address or importlib.util.find_spec("ray") is None:
        return
    from raysgd.cluster import ray_session

    for name, (total, free) in ray_session.overview(address).items():
        shown = _gib if "memory" in name else "{:g}".format
        yield name, shown(total), f"{shown(free)} free"
