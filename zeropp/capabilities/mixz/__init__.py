"""MixZ++: frozen weights are stored and gathered as codes."""
