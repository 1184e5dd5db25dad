"""The command ``raysgd``."""

from raysgd.cli.commands import app as app
from raysgd.cli.commands import main as main
