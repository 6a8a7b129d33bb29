"""What travels between ranks: by which hops, in which format, and how many bytes."""
