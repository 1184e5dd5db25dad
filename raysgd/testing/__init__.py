"""Test helpers: operators in this process, and faults in running trainers (``chaos``)."""

from raysgd.testing.operators import run_operator

__all__ = ["run_operator"]
