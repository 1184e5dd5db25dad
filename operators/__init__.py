"""Ready-made training operators."""
