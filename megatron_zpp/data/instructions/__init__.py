"""Examples to fine-tune on, packed into rows, with the loss on the answers."""
