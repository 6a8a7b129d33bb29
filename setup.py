"""The part of the build that pyproject.toml cannot say: the optional C++ and CUDA of csrc/.

They have a plain C interface and know neither Python nor torch, so that any C++17 compiler builds
them in seconds. Without one the package works too: plain PyTorch and NumPy stand in.

The kernels for GPUs are built where there are nvcc (in CUDA_HOME, on the PATH, in /usr/local/cuda)
and a torch that has CUDA. Whether it has, its version.py says, which is read and not imported: a
build that pip isolates sees no packages, but knows where those of the Python that runs it are. With
no torch there yet, they are not built.
ZPP_BUILD_CUDA=1 builds them for any torch, ZPP_BUILD_CUDA=0 for none. No GPU is needed.
"""

import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from glob import glob
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

# Contraction would fuse roundings that docs/numerics.md counts one by one.
EVERYWHERE = ["-std=c++17", "-O3", "-g0", "-ffp-contract=off", "-fno-math-errno"]
AVX2 = ["-mavx2", "-mfma", "-mf16c"]
AVX512 = [
    *AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl",
    "-Wno-maybe-uninitialized",  # GCC 12 warns of its own header, bug 105593
]  # fmt: skip
PER_SOURCE = {"csrc/cpu_avx2.cpp": AVX2, "csrc/cpu_avx512.cpp": AVX512}
CUDA = "zeropp.quant._cuda"
# Division is correctly rounded, and subnormals are kept, unless nvcc is told otherwise.
CUDA_FLAGS = ["-std=c++17", "-O3", "--fmad=false", "-Xcompiler=-fPIC,-ffp-contract=off"]
# GPUs whose own code is built: of the first two the older, where nvcc still knows it. Code runs on
# all of the same first digit; for later GPUs there is the last one's PTX.
OLDEST, NEWER = (70, 75), (80, 90)


class BuildKernels(build_ext):
    """Compiles each source with the flags of its instruction set; which one runs is seen later."""

    def build_extension(self, extension: Extension) -> None:
        """Compile and link; what goes wrong is a warning only, as the extension is optional."""
        if extension.name == CUDA:
            return self.build_cuda(extension)
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

    def build_cuda(self, extension: Extension) -> None:
        """Compile and link with nvcc, the runtime inside: nothing of CUDA is looked for later."""
        target = Path(self.get_ext_fullpath(extension.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        flags = [*extension.extra_compile_args, *gpus(find_nvcc())]
        self.spawn(
            [find_nvcc(), *flags, "--threads=0", "-cudart=static", "-shared", *extension.sources]
            + ["-o", str(target)]
        )


def find_nvcc() -> str | None:
    """The compiler of CUDA's toolkit, if there is one."""
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")]
    folders = [os.path.join(home, "bin") for home in homes if home]
    for place in (*folders, None, "/usr/local/cuda/bin"):  # None: the PATH
        if found := shutil.which("nvcc", path=place):
            return found
    return None


def gpus(nvcc: str) -> list[str]:
    """The flags that say for which GPUs to compile."""
    told = subprocess.run([nvcc, "--list-gpu-arch"], capture_output=True, text=True)
    known = [int(number) for number in re.findall(r"compute_(\d+)\b", told.stdout)]
    if NEWER[-1] not in known:
        raise CompileError(f"{nvcc} does not know compute_{NEWER[-1]}: CUDA 12 or newer is needed")
    real = [one for one in OLDEST if one in known][:1] + [one for one in NEWER if one in known]
    flags = [f"-gencode=arch=compute_{one},code=sm_{one}" for one in real]
    return [*flags, f"-gencode=arch=compute_{real[-1]},code=compute_{real[-1]}"]


def torch_cuda() -> str | None:
    """The CUDA version of the torch at hand; `None` without a torch, or of one without CUDA."""
    base = {"base": sys.base_prefix, "platbase": sys.base_prefix}
    known = [sysconfig.get_path("platlib"), sysconfig.get_path("platlib", vars=base)]
    for folder in (*sys.path, *known):
        version = Path(folder, "torch", "version.py")
        if version.is_file():
            found = re.search(r"^cuda\b.*=\s*['\"]([\d.]+)", version.read_text(), re.MULTILINE)
            return found.group(1) if found else None
    return None


def builds_cuda() -> bool:
    """Whether the kernels for GPUs are built."""
    wanted = os.environ.get("ZPP_BUILD_CUDA")
    if wanted not in (None, "", "0", "1"):
        sys.exit(f"error: ZPP_BUILD_CUDA is {wanted}; give 1 (build), 0 (do not), or nothing")
    if wanted == "1" and find_nvcc() is None:
        sys.exit("error: ZPP_BUILD_CUDA is 1 and there is no nvcc; set CUDA_HOME to a toolkit")
    return wanted == "1" or (wanted != "0" and bool(find_nvcc()) and torch_cuda() is not None)


KERNELS = Extension(
    "zeropp.quant._kernels",
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

GPU_KERNELS = Extension(
    CUDA,
    sources=sorted(glob("csrc/cuda_*.cu")),
    depends=sorted(glob("csrc/*.h")),
    extra_compile_args=CUDA_FLAGS,
    optional=True,
)

if __name__ == "__main__":
    setup(
        ext_modules=[KERNELS, INDEX, *([GPU_KERNELS] if builds_cuda() else [])],
        cmdclass={"build_ext": BuildKernels},
    )
