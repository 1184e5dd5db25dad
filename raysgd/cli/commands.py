"""The command ``raysgd``."""

import contextlib
import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

import raysgd
from raysgd.errors import CheckpointError

app = typer.Typer(
    help="Elastic distributed training on Ray.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback(invoke_without_command=True)
def main(
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False,
) -> None:
    """Elastic distributed training on Ray."""
    if version:
        typer.echo(f"raysgd {raysgd.__version__}")
        raise typer.Exit


@contextlib.contextmanager
def _without_traceback() -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, ImportError, CheckpointError) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from error


@app.command()
def report(
    logdir: Annotated[Path, typer.Argument(help="Folder of the run: TorchTrainer(logdir=...).")],
) -> None:
    """Rebuild report.html of a run from its logs."""
    from raysgd.callbacks.report import make_report

    with _without_traceback():
        typer.echo(make_report(logdir))


@app.command()
def compare(
    before: Annotated[Path, typer.Argument(help="Folder of a run.")],
    after: Annotated[Path, typer.Argument(help="Folder of a later run.")],
) -> None:
    """Compare where the time of each step goes in two runs, and name what grew most."""
    from raysgd.cli.compare import compare as compare_runs

    with _without_traceback():
        typer.echo(compare_runs(before, after))


@app.command()
def show(path: Annotated[str, typer.Argument(help="Path or URL of a checkpoint.")]) -> None:
    """Show what a checkpoint is and where it came from, as JSON."""
    from raysgd.checkpoint import read_manifest

    with _without_traceback():
        if (manifest := read_manifest(path)) is None:
            raise CheckpointError(f"{path} has no manifest: it is no checkpoint, or an old one.")
        typer.echo(manifest.to_json())


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
    from raysgd._internal.tracebacks import FoldingTracebacks
    from raysgd.cli import fit as fit_command

    try:
        settings = fit_command.read_settings(config, overrides or ())
        options = {"num_workers": num_workers, "logdir": logdir}
        settings["trainer"] |= {name: v for name, v in options.items() if v is not None}
        settings["fit"] |= {} if num_epochs is None else {"num_epochs": num_epochs}
        if not settings["fit"]:
            raise ValueError("raysgd fit needs --num-epochs, or fit.max_steps=...")
        with FoldingTracebacks():
            fit_command.fit(fit_command.load_operator(operator), settings)
    except Exception as error:
        text, code = fit_command.describe_error(error)
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
    from raysgd.cli import doctor as examination

    examination.examine(typer.echo)
    if shares and not address:
        typer.echo("\nraysgd doctor --shares needs --address, for example auto.", err=True)
        raise typer.Exit(2)
    if address == "local":  # Ray would start a cluster
        typer.echo("\nThere is no cluster at the address 'local': each script starts its own Ray.")
    elif address and importlib.util.find_spec("ray") is not None:
        try:
            typer.echo(f"\nRay cluster at {address}:")
            examination.show(list(examination.cluster_rows(address)), typer.echo)
            if shares:
                typer.echo(
                    "\nShares of the nodes by speed, and names for ElasticConfig(shares=...):"
                )
                examination.show(list(examination.node_rows(address)), typer.echo)
        except Exception as error:  # Ray raises errors of many types
            advice = " Timing needs one free CPU or GPU on each node." * shares
            typer.echo(f"{error}{advice}", err=True)
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
    if not (known := sorted(path.stem for path in folder.glob("[!_]*.py"))):
        typer.echo(f"There is no {folder}. Use a clone of the repository.", err=True)
        raise typer.Exit(1)
    if name not in known:
        typer.echo(f"raysgd bench {name}: must be one of {', '.join(known)}.", err=True)
        raise typer.Exit(2)
    command = [sys.executable, str(folder / f"{name}.py"), *context.args]
    raise typer.Exit(subprocess.run(command, check=False).returncode)
