"""Decisions about the group: pure functions of their arguments, for the supervisor to act on."""
