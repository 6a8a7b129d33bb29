"""Muon: momentum whose matrices are orthogonalized where their rows are."""
