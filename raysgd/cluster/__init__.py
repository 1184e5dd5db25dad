"""Worker actors, their placement, and their supervision. This package depends only on Ray."""
