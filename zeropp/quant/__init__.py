"""Block quantization to INT8 and INT4 for communication.

Packing of rows, ops with schemas and fake kernels, the reference, kernels by device, and timing.
"""
