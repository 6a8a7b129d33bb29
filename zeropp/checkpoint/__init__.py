"""What is saved, under which names, and what makes a checkpoint complete."""
