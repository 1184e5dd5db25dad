"""Tests of the promises of raysgd, through public interfaces only.

Run these tests before and after each step of a refactoring, which must not change them. Only two
files depend on internals: ``simulation/seam.py`` (how the driver talks to simulated workers) and
``golden/seam.py`` (how a loader is sharded without a trainer).
"""
