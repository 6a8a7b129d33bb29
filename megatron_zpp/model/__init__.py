"""The GPT: its layers, loss, initial weights, and operation counts."""
