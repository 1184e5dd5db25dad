"""The worker's side of an operator, independent of the framework."""
