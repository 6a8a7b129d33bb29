"""Mixtures of experts: the router, the experts, the layer, and the losses that balance the load."""
