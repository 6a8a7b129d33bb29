"""Block quantization to INT8 and INT4 for communication.

Packing of rows, ops with schemas and fake kernels, the reference, kernels by device, and timing.
"""

from zeropp.exports import exports

__getattr__, __dir__, __all__ = exports(__name__, __file__)
