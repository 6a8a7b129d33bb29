"""What capabilities add to a GPT's run: flags, rows of the start-up table, lines when resumed."""
