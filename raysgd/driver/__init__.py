"""The driver side of both operator families."""
