"""How a model is cut into shards, and what a step must know about them."""
