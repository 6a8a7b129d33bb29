"""`deepspeed.checkpoint`: helpers for state dicts."""
