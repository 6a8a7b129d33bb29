"""Attention: its layer, its kernels, its positions, and the cache of generation."""
