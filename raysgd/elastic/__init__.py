"""Decisions about the group: pure functions of their arguments, for the controller to act on."""
