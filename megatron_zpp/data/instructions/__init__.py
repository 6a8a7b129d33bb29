"""Fine-tuning examples, packed into rows, with a loss on the answers only."""
