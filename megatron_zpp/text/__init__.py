"""Text from a model, and how well a model predicts text."""
