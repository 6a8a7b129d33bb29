"""`deepspeed.ops`: optimizers."""
