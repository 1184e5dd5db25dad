"""Features of training steps, one in each file. They use the training state."""
