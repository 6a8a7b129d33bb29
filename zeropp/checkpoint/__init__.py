"""Checkpoints of sharded models: what is saved, and what decides that a checkpoint is complete."""
