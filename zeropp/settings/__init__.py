"""What a DeepSpeed-style JSON may say, and what each key means here."""
