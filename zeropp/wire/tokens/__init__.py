"""What ranks that share layers send each other: the rows of tokens, and other activations."""
