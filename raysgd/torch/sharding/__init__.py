"""How parameters and optimizer state are divided over the workers."""
