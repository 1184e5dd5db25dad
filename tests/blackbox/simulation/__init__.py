"""A simulated cluster: ``world.py`` simulates it, and ``seam.py`` connects it to the driver."""
