"""Helpers for raysgd's own use."""
