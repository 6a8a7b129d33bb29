"""What a run does beside the other nodes, where each steps alone in a world of its own."""
