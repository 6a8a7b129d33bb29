"""The compiled libraries of csrc/: whether they are current, and the functions they have."""
