"""How processes of one run reach each other."""
