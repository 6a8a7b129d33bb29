"""How a run is saved and loaded, and how the weights of a checkpoint are read."""
