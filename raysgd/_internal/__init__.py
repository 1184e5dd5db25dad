"""Helpers that only raysgd itself uses."""
