"""What ``raysgd doctor`` shows: packages, resources, and known problems."""

import contextlib
import importlib.metadata
import importlib.util
import platform
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil

import raysgd
from raysgd._internal.versions import TESTED, is_at_least, is_tested

Row = tuple[str, str, str]

_PACKAGES = {
    "ray": "more than one worker",
    "pyarrow": 'Ray Tune and Ray Data: pip install "raysgd[tune,data]"',
    "numpy": "everything",
    "torch": "TorchTrainer",
    "triton": "torch.compile on GPUs",
    "tensorflow": "TFTrainer",
    "horovod": 'backend="horovod"',
    "apex": 'use_fp16="apex"',
    "safetensors": "save_model",
    "torchmetrics": "metric collections in operators",
    "transformers": "operators for Hugging Face models",
    "tensorboard": "TensorBoard logs",
    "mlflow": "MLflow logs",
    "wandb": "Weights & Biases logs",
}


def examine(echo: Callable[[str], object]) -> None:
    """Show the packages and resources of this machine."""
    versions = {name: installed_version(name) for name in _PACKAGES}
    rows: list[Row] = [package_row("Python", platform.python_version())]
    rows += [("raysgd", raysgd.__version__, "")]
    rows += [package_row(name, version) for name, version in versions.items()]
    memory = psutil.virtual_memory()
    rows += [("CPUs here", str(psutil.cpu_count()), "")]
    rows += [("memory here", _format_gib(memory.total), f"{_format_gib(memory.available)} free")]
    show([*rows, *_torch_rows()], echo)
    for problem in problems(versions):
        echo(f"\nWarning: {problem}")


def show(rows: Sequence[Row], echo: Callable[[str], object]) -> None:
    """Show rows as aligned columns."""
    width = [max(len(row[column]) for row in rows) for column in (0, 1)]
    for name, value, note in rows:
        echo(f"{name:{width[0]}}  {value:{width[1]}}  {note}".rstrip())


def package_row(name: str, version: str | None) -> Row:
    """Return the version of a package, and whether it is tested or what it is for."""
    if version is None:
        return name, "missing", f"for {_PACKAGES[name]}"
    if name not in TESTED:
        return name, version, ""
    oldest, newest = TESTED[name]
    tested = oldest if oldest == newest else f"{oldest} to {newest}"
    if not is_at_least(version, oldest):
        return name, version, f"too old: raysgd needs {oldest} or newer"
    return name, version, "tested" if is_tested(name, version) else f"not tested, unlike {tested}"


def installed_version(name: str) -> str | None:
    """Return the version of a package without importing it, or None if it is missing."""
    if importlib.util.find_spec(name) is None or (name == "apex" and not _is_nvidia_apex()):
        return None
    for distribution in (name, f"{name}-cpu", f"{name}-skinny"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(distribution)
    return "unknown version"


def _is_nvidia_apex() -> bool:
    spec = importlib.util.find_spec("apex")
    folders = (spec and spec.submodule_search_locations) or ()
    return any((Path(folder) / "amp").is_dir() for folder in folders)


def problems(versions: dict[str, str | None]) -> Iterator[str]:
    """Return the known problems of installed packages together."""
    if versions["tensorflow"] and versions["triton"]:
        yield (
            f"tensorflow {versions['tensorflow']} and triton {versions['triton']} work in one "
            "process only if triton is imported first. Otherwise, the process aborts with 'LLVM "
            "ERROR: inconsistency in registered CommandLine options' when it loads triton, for "
            "example in torch.compile. TFTrainer avoids this. If your code imports tensorflow and "
            "uses torch.compile, write `import triton` above the import of tensorflow."
        )
    if importlib.util.find_spec("apex") is not None and not versions["apex"]:
        yield (
            'the package apex has no apex.amp, so use_fp16="apex" cannot use it. The apex of the '
            "package index is another project, and new versions of NVIDIA Apex have no apex.amp. "
            "Pass use_fp16=True for the mixed precision of PyTorch."
        )


def _format_gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"


def _torch_rows() -> Iterator[Row]:
    if importlib.util.find_spec("torch") is None:
        return
    try:
        import torch
        import torch.distributed as dist
    except Exception as error:  # a broken installation is what doctor is for
        yield "torch", "broken", f"its import fails: {error!r}"
        return
    cuda = torch.version.cuda
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    yield "CUDA", cuda or "missing", "for GPUs" if cuda is None else ""
    yield "GPUs here", str(gpus), ", ".join(torch.cuda.get_device_name(i) for i in range(gpus))
    for name, there in (("gloo", dist.is_gloo_available()), ("nccl", dist.is_nccl_available())):
        yield name, "available" if there else "missing", "" if there else f'for backend="{name}"'


def node_rows(address: str) -> Iterator[Row]:
    """Return the speed of each node of a cluster, relative to their mean."""
    from raysgd.cluster import ray_session

    speeds = ray_session.node_speeds(address)
    mean = sum(speed for _, speed, _ in speeds) / len(speeds)
    for ip, speed, traits in speeds:
        yield ip, f"{speed / mean:.2f}", ", ".join(sorted(traits))


def cluster_rows(address: str) -> Iterator[Row]:
    """Return the total and the free resources of a cluster."""
    from raysgd.cluster import ray_session

    for name, (total, free) in ray_session.resources(address).items():
        shown = _format_gib if "memory" in name else "{:g}".format
        yield name, shown(total), f"{shown(free)} free"
