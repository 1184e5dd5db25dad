"""The command ``raysgd``."""

from __future__ import annotations

import contextlib
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
    operator: Annotated[str, typer.Argument(help="package.module:Operator, or file.py:Operator.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            help="For example config.lr=0.1, trainer.use_gpu=true, fit.max_steps=100, or "
            "checkpoint.every=500."
        ),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            help="YAML or JSON file with the keys config, trainer, fit, checkpoint.",
        ),
    ] = None,
    num_workers: Annotated[int | None, typer.Option(help="trainer.num_workers=...")] = None,
    num_epochs: Annotated[int | None, typer.Option(help="fit.num_epochs=...")] = None,
    logdir: Annotated[
        str | None,
        typer.Option(help="trainer.logdir=..., the run folder. The default is runs/OPERATOR."),
    ] = None,
) -> None:
    """Train an operator. Run the same command again to resume from the newest checkpoint."""
    from raysgd.cli import fit as fit_command

    try:
        settings = fit_command.read_settings(config, overrides or ())
        given = {"num_workers": num_workers, "logdir": logdir}
        settings["trainer"] |= {name: v for name, v in given.items() if v is not None}
        settings["fit"] |= {} if num_epochs is None else {"num_epochs": num_epochs}
        if not settings["fit"]:
            raise ValueError("raysgd fit needs --num-epochs, or fit.max_steps=...")
        fit_command.fit(fit_command.load_operator(operator), settings)
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
            help="Also show the Ray cluster at this address, for example auto.",
        ),
    ] = None,
    shares: Annotated[
        bool, typer.Option(help="Time each node of the cluster, and show what share it would get.")
    ] = False,
) -> None:
    """Show the packages and resources of this machine and of a cluster."""
    rows = [("Python", platform.python_version(), ""), ("raysgd", raysgd.__version__, "")]
    rows += [(name, _installed_version(name) or "missing", use) for name, use in _PACKAGES.items()]
    memory = psutil.virtual_memory()
    rows += [("CPUs here", str(psutil.cpu_count()), "")]
    rows += [("memory here", _gib(memory.total), f"{_gib(memory.available)} free")]
    _show([*rows, *_torch_rows()])
    if shares and not address:
        typer.echo("\nraysgd doctor --shares needs --address, for example auto.", err=True)
        raise typer.Exit(2)
    if address == "local":  # Ray would start a cluster
        typer.echo("\nThere is no cluster at the address 'local': each script starts its own Ray.")
    elif address and importlib.util.find_spec("ray") is not None:
        try:
            typer.echo(f"\nRay cluster at {address}:")
            _show(list(_cluster_rows(address)))
            if shares:
                typer.echo(
                    "\nShares of the nodes by speed, and names for ElasticConfig(shares=...):"
                )
                _show(list(_node_rows(address)))
        except Exception as error:  # Ray raises errors of many types
            advice = " Timing needs one free CPU or GPU on each node." * shares
            typer.echo(f"No answer from a Ray cluster at {address!r}: {error}{advice}", err=True)
            raise typer.Exit(1) from error


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def bench(
    context: typer.Context,
    name: Annotated[
        str, typer.Argument(help="all, or a name. The benchmark gets the options that follow.")
    ] = "all",
) -> None:
    """Run a benchmark. Needs a clone of the repository."""
    folder = Path(raysgd.__file__).resolve().parent.parent / "examples" / "benchmarks"
    known = sorted(path.stem for path in folder.glob("[!_]*.py"))
    if not known:
        typer.echo(f"There is no {folder}. Use a clone of the repository.", err=True)
        raise typer.Exit(1)
    if name not in known:
        typer.echo(f"raysgd bench {name}: must be one of {', '.join(known)}.", err=True)
        raise typer.Exit(2)
    command = [sys.executable, str(folder / f"{name}.py"), *context.args]
    raise typer.Exit(subprocess.run(command, check=False).returncode)


def _show(rows: Sequence[tuple[str, str, str]]) -> None:
    width = [max(len(row[column]) for row in rows) for column in (0, 1)]
    for name, found, use in rows:
        note = f"for {use}" if found == "missing" else use if name not in _PACKAGES else ""
        typer.echo(f"{name:{width[0]}}  {found:{width[1]}}  {note}".rstrip())


def _installed_version(name: str) -> str | None:
    """Return the version of a package without importing it, or None if it is missing."""
    if importlib.util.find_spec(name) is None:
        return None
    for distribution in (name, f"{name}-cpu", f"{name}-skinny"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(distribution)
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


def _node_rows(address: str) -> Iterator[tuple[str, str, str]]:
    from raysgd.cluster import ray_session

    speeds = ray_session.node_speeds(address)
    mean = sum(speed for _, speed, _ in speeds) / len(speeds)
    for ip, speed, traits in speeds:
        yield ip, f"{speed / mean:.2f}", ", ".join(sorted(traits))


def _cluster_rows(address: str) -> Iterator[tuple[str, str, str]]:
    from raysgd.cluster import ray_session

    for name, (total, free) in ray_session.overview(address).items():
        shown = _gib if "memory" in name else "{:g}".format
        yield name, shown(total), f"{shown(free)} free"
