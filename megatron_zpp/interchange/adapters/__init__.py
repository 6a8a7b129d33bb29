"""LoRA adapters of checkpoints and of PEFT's folders: read, written, and merged into weights."""
