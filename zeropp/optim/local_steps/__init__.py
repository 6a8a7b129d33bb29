"""Nodes that step alone and exchange how far they came, every so-many steps."""
