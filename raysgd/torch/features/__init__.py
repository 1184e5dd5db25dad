"""Features of training steps, one in each file. `registered.py` has what they use."""
