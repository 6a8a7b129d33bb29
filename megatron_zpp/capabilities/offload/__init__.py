"""ZeRO-Offload for a GPT: its flags, its memory, its optimizer, and its row at the start."""
