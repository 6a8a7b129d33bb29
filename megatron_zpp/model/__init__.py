"""The GPT: its layers, loss, initial weights, LoRA adapters, and operation counts."""
