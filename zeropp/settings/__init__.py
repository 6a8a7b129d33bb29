"""What a DeepSpeed-style JSON may say, and what each key means here."""

from zeropp.exports import exports

__getattr__, __dir__, __all__ = exports(__name__, __file__)
