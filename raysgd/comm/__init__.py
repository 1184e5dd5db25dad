"""Communication between the processes of a run."""
