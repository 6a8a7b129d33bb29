"""Muon for a GPT: its flags, the parts of a GPT's matrices, and what it says of a run."""
