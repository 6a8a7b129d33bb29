"""LoRA adapters of PEFT's folders: read and written."""
