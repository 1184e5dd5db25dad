"""Features of training steps, one in each file."""
