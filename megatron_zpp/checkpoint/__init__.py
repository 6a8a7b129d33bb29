"""How a run is written to disk, and how its weights are read back."""
