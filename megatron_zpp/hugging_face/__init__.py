"""Hugging Face's folders of models: their settings, their tensors and their tokenizers.

One table of settings (`settings.py`) and one of tensors (`table.py`), each read in both directions.
"""
