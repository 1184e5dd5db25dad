"""The command ``raysgd``."""

from raysgd.cli.commands import app, main

__all__ = ["app", "main"]
