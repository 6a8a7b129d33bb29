"""The settings of the GPT: its shape and numerics."""
