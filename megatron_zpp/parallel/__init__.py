"""Which ranks share what, and what they send each other."""
