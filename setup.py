"""The part of the build that pyproject.toml cannot say: the optional C++ of csrc/.

They have a plain C interface and know neither Python nor torch, so that any C++17 compiler builds
them in seconds. Without one the package works too: plain PyTorch and NumPy stand in.
"""

import platform
from glob import glob

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

# Contraction would fuse roundings that docs/numerics.md counts one by one.
EVERYWHERE = ["-std=c++17", "-O3", "-g0", "-ffp-contract=off"]
AVX2 = ["-mavx2", "-mfma", "-mf16c"]
AVX512 = [
    *AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl",
    "-Wno-maybe-uninitialized",  # GCC 12 warns of its own header, bug 105593
]  # fmt: skip
PER_SOURCE = {"csrc/cpu_avx2.cpp": AVX2, "csrc/cpu_avx512.cpp": AVX512}


class BuildKernels(build_ext):
    """Compiles each source with the flags of its instruction set; which one runs is seen later."""

    def build_extension(self, extension: Extension) -> None:
        """Compile and link; what goes wrong is a warning only, as the extension is optional."""
        is_x86 = platform.machine().lower() in ("x86_64", "amd64")
        objects = []
        for source in extension.sources:
            own = PER_SOURCE.get(source, []) if is_x86 else []
            objects += self.compiler.compile(
                [source],
                output_dir=self.build_temp,
                extra_postargs=[*extension.extra_compile_args, *own],
                depends=extension.depends,
            )
        self.compiler.link_shared_object(
            objects,
            self.get_ext_fullpath(extension.name),
            extra_postargs=extension.extra_link_args,
            target_lang="c++",
        )


KERNELS = Extension(
    "zeropp._kernels",
    sources=sorted(glob("csrc/cpu*.cpp")),
    depends=sorted(glob("csrc/*.h")),
    extra_compile_args=EVERYWHERE,
    extra_link_args=["-pthread"],
    optional=True,
)

INDEX = Extension(
    "megatron_zpp.data._index",
    sources=["csrc/index.cpp"],
    extra_compile_args=EVERYWHERE,
    optional=True,
)

setup(ext_modules=[KERNELS, INDEX], cmdclass={"build_ext": BuildKernels})
