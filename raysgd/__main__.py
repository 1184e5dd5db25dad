"""``python -m raysgd``, which is the command ``raysgd``."""

from raysgd.cli.commands import app

if __name__ == "__main__":
    app(prog_name="python -m raysgd")
