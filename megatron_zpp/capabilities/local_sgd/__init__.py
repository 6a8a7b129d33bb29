"""Local SGD (DiLoCo) for a GPT's run: who steps together, checkpoints, rows of the table."""
