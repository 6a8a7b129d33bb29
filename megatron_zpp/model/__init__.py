"""The GPT itself: its layers, its loss, its first weights, its operations."""
