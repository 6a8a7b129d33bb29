"""Megatron's flags that are accepted and have no effect, each with the reason."""
