"""How long a step takes on hardware that is not at hand."""
