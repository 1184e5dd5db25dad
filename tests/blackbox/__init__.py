"""What raysgd promises, asked through public interfaces only.

These tests are run before and after each step of a change of the inside, thousands of times where
they draw their cases, and do not change with it. What has to know the inside is in two files:
``simulation/seam.py`` (what the driver says to simulated workers) and ``golden/seam.py`` (how a
loader is shared out without a trainer). A test here imports no other module of the inside.
"""
