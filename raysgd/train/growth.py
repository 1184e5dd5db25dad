"""Decides when the workers of a training function may restart to become more."""

from __future__ import annotations

from raysgd.train.report_queue import Turn


class Growth:
    """Tracks in which order a function reports and saves, and decides when its workers may grow.

    To grow, all workers restart from the newest checkpoint. The function waits at each checkpoint
    and at the next report, so a restart then repeats no step. It must not skip a report either:

    ======================  ==================================================================
    order of the function   the workers may grow
    ======================  ==================================================================
    report, then save       at each checkpoint
    both together           at each report with a checkpoint
    save, then report       at the report after a checkpoint, or at the next checkpoint if no
                            report comes between
    ======================  ==================================================================

    The first turn of the run shows the order.
    """

    def __init__(self) -> None:
        self._saves_first: bool | None = None  # None before the first turn
        self._awaits_report = False  # the newest turn is a checkpoint that a report may follow

    def restart(self) -> None:
        """Forget a checkpoint from which the workers start again, before its report."""
        self._awaits_report = False

    def after(self, turn: Turn) -> bool:
        """Return whether a restart after this turn, with `turn.iteration`, skips no report."""
        if self._saves_first is None:
            self._saves_first = turn.kind == "checkpoint"
        if turn.not_finite:  # a restart would repeat the steps since an earlier checkpoint
            return False
        has_waited = self._awaits_report
        self._awaits_report = self._saves_first and turn.kind == "checkpoint"
        is_complete = turn.has_checkpoint and not self._awaits_report
        return turn.kind != "end" and (has_waited or is_complete)
