"""Experts that ranks split: the way of tokens to them and back, and DeepSpeed's keys for it."""
