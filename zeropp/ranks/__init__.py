"""Which ranks there are, how they are started, and what they do together."""
