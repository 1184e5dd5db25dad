"""Recovery decisions about the group, and the controller that executes them."""
