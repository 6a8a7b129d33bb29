"""Nodes that come and go: who takes part in what nodes do together, decided in a store."""
