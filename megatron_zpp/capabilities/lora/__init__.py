"""LoRA: low-rank adapters beside frozen weights, and checkpoints that hold them."""
