"""Which tokens a step sees, and in which order."""
