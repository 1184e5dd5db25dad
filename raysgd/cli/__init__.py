"""The command ``raysgd``."""

from raysgd.cli.commands import app as app
