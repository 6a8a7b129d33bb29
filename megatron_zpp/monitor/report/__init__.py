"""The report of a run: its curves, bytes and configuration on one page, without network."""
