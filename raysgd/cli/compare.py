"""The command ``raysgd compare``: which phase of a step takes longer than in an earlier run."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, median

from raysgd._internal.step_timing import PHASES
from raysgd.callbacks.report import RunLog, explain_log_errors

_MIN_MS = 0.005
_MIN_FRACTION, _MIN_FRACTION_OF_ONE = 0.05, 0.2
"""Fraction of a step below which no change counts; the second if a run has one measurement."""


def compare(before: Path, after: Path) -> str:
    """Return a table of the phases of two runs, and a sentence about what changed most.

    Raises:
        OSError, ValueError: if a folder has no table of phases.
    """
    old, new = (_measurements(folder) for folder in (before, after))
    is_one = min(len(old["step"]), len(new["step"])) == 1
    least = median(old["step"]) * (_MIN_FRACTION_OF_ONE if is_one else _MIN_FRACTION)
    lines = [f"{'ms per step':12}{'before':>10}{'after':>10}{'spread':>10}"]
    changes: list[tuple[float, str]] = []
    for name in (*PHASES, "step"):
        first, second = median(old[name]), median(new[name])
        spread = max(_spread(old[name]), _spread(new[name]))
        if max(first, second) >= _MIN_MS:
            lines.append(f"{name:12}{first:10.3g}{second:10.3g}{spread:10.2g}")
        if abs(second - first) > max(spread, least) and not (name == "step" and changes):
            text = f"{name}: from {first:.3g} to {second:.3g} ms per step."
            changes.append((second - first, text))
    if not changes:
        lines.append("Nothing differs beyond the spread.")
    elif (most := max(changes))[0] > 0:
        lines.append(f"What grew most is {most[1]}")
    else:
        lines.append(f"Nothing grew beyond the spread. What shrank most is {min(changes)[1]}")
    return "\n".join(lines)


def _measurements(folder: Path) -> Mapping[str, Sequence[float]]:
    """Return the milliseconds per step of each phase in each call or logged part of a call.

    A phase counts on its slowest worker. The others wait for it, so the shortest wait counts.
    """
    with explain_log_errors(folder):
        log = RunLog(folder)
        kinds = [[c["speed"] for c in log.calls_of(k) if c.get("speed")] for k in ("step", "train")]
        if not (speeds := max(kinds, key=len)):
            raise ValueError(
                f"{folder} has no table of phases: it is of an older version of raysgd, or no call "
                "of train() has ended. Use the folder of a run that trained."
            )
        values = {
            name: [1000 * (min if name == "wait" else max)(s[f"{name}_s"]) for s in speeds]
            for name in PHASES
        }
        return {**values, "step": [1000 * sum(mean(s[f"{n}_s"]) for n in PHASES) for s in speeds]}


def _spread(values: Sequence[float]) -> float:
    """Return the range of the values, without the highest and the lowest quarter."""
    cut = len(values) // 4
    middle = sorted(values)[cut : len(values) - cut]
    return middle[-1] - middle[0]
