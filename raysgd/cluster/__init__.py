"""Worker actors, their placement, and their supervision. Knows Ray and no framework."""
