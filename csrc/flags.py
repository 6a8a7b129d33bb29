"""The compilers' flags for the sources in this folder; setup.py uses them.

They are part of the hash of the sources: a library built with other flags counts as outdated.
"""

# Contraction would fuse roundings that docs/numerics.md counts one by one.
CPU_FLAGS = ["-std=c++17", "-O3", "-g0", "-ffp-contract=off", "-fno-math-errno"]
PLAIN_X86_FLAGS = ["-Os"]  # 40% of the time to compile, for processors older than AVX2 (2013)
AVX2_FLAGS = ["-mavx2", "-mfma", "-mf16c"]
AVX512_FLAGS = [
    *AVX2_FLAGS, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl",
    "-Wno-maybe-uninitialized", "-Wno-uninitialized",  # in GCC 12's own header, bug 105593
]  # fmt: skip

# nvcc rounds divisions correctly and keeps subnormals unless it is told otherwise.
CUDA_FLAGS = ["-std=c++17", "-O3", "--fmad=false", "-Xcompiler=-fPIC,-ffp-contract=off"]
# Compute capabilities with code of their own: the first of OLDEST that nvcc knows, and NEWER. Code
# runs on all GPUs of the same major version; later GPUs compile the PTX of the last one.
OLDEST_GPUS, NEWER_GPUS = (70, 75), (80, 90)
