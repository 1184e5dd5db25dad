"""A simulated cluster: ``world.py`` says what happens in it, ``seam.py`` how the driver sees it."""
