"""ZeRO and ZeRO++ for any PyTorch model, on top of FSDP2."""

from zeropp.exports import exports

__version__ = "0.1.0"
__getattr__, __dir__, __all__ = exports(__name__, __file__)
