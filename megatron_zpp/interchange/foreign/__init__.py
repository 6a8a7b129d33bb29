"""Checkpoints of other programs: read as one kind of thing, whatever their files, and written."""
