"""Where models and optimizer states are, and how gradients meet: one file for each way."""
