"""Where each part of the model lives: the mesh of ranks and the recipe that uses it."""
