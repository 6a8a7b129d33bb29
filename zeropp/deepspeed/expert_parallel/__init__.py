"""DeepSpeed's AutoEP."""
