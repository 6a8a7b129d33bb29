"""DeepSpeed's AutoEP: layers whose experts ranks split, in the places of a model's own ones."""
