"""The part of the build that pyproject.toml cannot express: the optional C++ and CUDA of csrc/.

The sources have a plain C interface and use neither Python nor torch, so that any C++17 compiler
builds them in seconds, and one wheel serves every version of Python. The package works without them
as well, in plain PyTorch and NumPy.

The kernels for GPUs are built if there are nvcc (in CUDA_HOME, on the PATH, in /usr/local/cuda) and
a torch with CUDA. torch's version.py says whether it has CUDA; it is read and not imported, because
a build that pip isolates sees no packages, but knows where those of the Python that runs it are. If
torch is not installed yet, they are not built. ZPP_BUILD_CUDA=1 builds them for any torch,
ZPP_BUILD_CUDA=0 for none. No GPU is needed. ZPP_BUILD=0 builds nothing at all.

Each library contains the hash of csrc/. A build that does not happen in place also writes that hash
into the package, which is then installed without csrc/.
"""

import os
import platform
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from importlib.machinery import EXTENSION_SUFFIXES
from itertools import chain
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

ROOT = Path(__file__).resolve().parent
FLAGS = runpy.run_path(str(ROOT / "csrc/flags.py"))
CUDA_FLAGS = FLAGS["CUDA_FLAGS"]
HASHING = runpy.run_path(str(ROOT / "zeropp/native/library.py"))
SOURCE_HASH = HASHING["source_hash"](ROOT / "csrc")
CPU, CUDA, INDEX = "zeropp.native._cpu", "zeropp.native._cuda", "megatron_zpp.data._index"


class BuildLibraries(build_ext):
    """Compiles each source with the flags of its instruction set, which is chosen at run time.

    only_here: in place, which setuptools tells `run` alone: it builds elsewhere, and then copies.
    """

    only_here = False

    def run(self) -> None:
        """Build all libraries, in place those of other sources only.

        The hash of the sources is recorded in a package to be installed.
        """
        self.only_here = bool(self.inplace)
        if self.only_here:
            self.extensions = [each for each in self.extensions if not self._is_built(each)]
        super().run()
        if not self.only_here:
            record = Path(self.build_lib, "zeropp", HASHING["RECORD"])
            record.parent.mkdir(parents=True, exist_ok=True)
            record.write_text(f"{SOURCE_HASH}\n")

    def get_ext_filename(self, fullname: str) -> str:
        """The path of a library, whose name holds no version of Python: one file for all."""
        path = super().get_ext_filename(fullname)
        return path.removesuffix(sysconfig.get_config_var("EXT_SUFFIX")) + EXTENSION_SUFFIXES[-1]

    def build_extension(self, extension: Extension) -> None:
        """Compile and link; as the extension is optional, an error is only a warning."""
        if extension.name == CUDA:
            return self.build_cuda(extension)

        def compile_source(source: str) -> list[str]:
            return self.compiler.compile(
                [source],
                output_dir=self.build_temp,
                extra_postargs=[*extension.extra_compile_args, *isa_flags(source)],
                depends=extension.depends,
            )

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = list(chain.from_iterable(pool.map(compile_source, extension.sources)))
        self.compiler.link_shared_object(
            objects,
            self.get_ext_fullpath(extension.name),
            extra_postargs=extension.extra_link_args,
            target_lang="c++",
        )

    def _is_built(self, extension: Extension) -> bool:
        """Whether a library was built in place from these sources."""
        target = Path(self.get_ext_fullpath(extension.name))
        return target.exists() and SOURCE_HASH.encode() in target.read_bytes()

    def build_cuda(self, extension: Extension) -> None:
        """Compile and link with nvcc, CUDA's runtime included: it is not searched for later."""
        target = Path(self.get_ext_fullpath(extension.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        flags = [*extension.extra_compile_args, *gpus(find_nvcc(), only_here=self.only_here)]
        self.spawn(
            [find_nvcc(), *flags, "--threads=0", "-cudart=static", "-shared", *extension.sources]
            + ["-o", str(target)]
        )


class WheelForAnyPython(bdist_wheel):
    """Tags the wheel for the platform alone: the libraries do not depend on Python."""

    def get_tag(self) -> tuple[str, str, str]:
        """Return the tags of Python, of its binary interface and of the platform."""
        return "py3", "none", super().get_tag()[2]


def isa_flags(source: str) -> list[str]:
    """The flags of a source for one instruction set; on other processors it is empty."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return []
    names = {"cpu_plain": "PLAIN_X86", "cpu_avx2": "AVX2", "cpu_avx512": "AVX512"}
    name = names.get(Path(source).stem)
    return FLAGS[f"{name}_FLAGS"] if name else []


def find_nvcc() -> str | None:
    """The path of CUDA's compiler, if there is one."""
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")]
    folders = [os.path.join(home, "bin") for home in homes if home]
    for folder in (*folders, None, "/usr/local/cuda/bin"):  # None: the PATH
        if nvcc := shutil.which("nvcc", path=folder):
            return nvcc
    return None


def gpus_here() -> list[int]:
    """The compute capabilities of this machine's GPUs, as in 90."""
    command = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    if shutil.which(command[0]) is None:
        return []
    listing = subprocess.run(command, capture_output=True, text=True).stdout
    return sorted({int(number.replace(".", "")) for number in re.findall(r"\d+\.\d", listing)})


def gpus(nvcc: str, *, only_here: bool) -> list[str]:
    """The flags that say for which GPUs to compile; `only_here`: for this machine's, if any.

    A build in place, which is not for other machines, takes a quarter of the time that way.
    """
    listing = subprocess.run([nvcc, "--list-gpu-arch"], capture_output=True, text=True).stdout
    supported = [int(number) for number in re.findall(r"compute_(\d+)\b", listing)]
    oldest, newer = FLAGS["OLDEST_GPUS"], FLAGS["NEWER_GPUS"]
    if newer[-1] not in supported:
        raise CompileError(f"{nvcc} does not know compute_{newer[-1]}: CUDA 12 or newer is needed")
    here = [gpu for gpu in gpus_here() if gpu in supported] if only_here else []
    chosen = here or [
        *[gpu for gpu in oldest if gpu in supported][:1],
        *[gpu for gpu in newer if gpu in supported],
    ]
    flags = [f"-gencode=arch=compute_{gpu},code=sm_{gpu}" for gpu in chosen]
    return [*flags, f"-gencode=arch=compute_{chosen[-1]},code=compute_{chosen[-1]}"]


def torch_cuda() -> str | None:
    """The CUDA version of the installed torch; `None` if there is no torch, or one without CUDA."""
    base = {"base": sys.base_prefix, "platbase": sys.base_prefix}
    installed = [sysconfig.get_path("platlib"), sysconfig.get_path("platlib", vars=base)]
    for folder in (*sys.path, *installed):
        version = Path(folder, "torch", "version.py")
        if version.is_file():
            match = re.search(r"^cuda\b.*=\s*['\"]([\d.]+)", version.read_text(), re.MULTILINE)
            return match.group(1) if match else None
    return None


def builds_cuda() -> bool:
    """Whether the kernels for GPUs are built."""
    setting = os.environ.get("ZPP_BUILD_CUDA")
    if setting not in (None, "", "0", "1"):
        sys.exit(f"error: ZPP_BUILD_CUDA is {setting}; give 1 (build), 0 (do not), or nothing")
    if setting == "1" and find_nvcc() is None:
        sys.exit("error: ZPP_BUILD_CUDA is 1 and there is no nvcc; set CUDA_HOME to a toolkit")
    return setting == "1" or (setting != "0" and bool(find_nvcc()) and torch_cuda() is not None)


def library(name: str, patterns: list[str], flags: list[str]) -> Extension:
    """A library of the sources in csrc/ that match the patterns."""
    csrc = Path("csrc")
    sources = [path for pattern in patterns for path in sorted(csrc.glob(pattern))]
    return Extension(
        name,
        sources=[path.as_posix() for path in (*sources, csrc / "shared/source_hash.cpp")],
        depends=[path.as_posix() for path in sorted(csrc.glob("*/*.h"))],
        extra_compile_args=[*flags, f"-DZPP_SOURCE_HASH={SOURCE_HASH}"],
        extra_link_args=["-pthread"],
        optional=True,
    )


def libraries() -> list[Extension]:
    """All that is built here."""
    if os.environ.get("ZPP_BUILD") == "0":
        return []
    built = [
        library(CPU, ["*/cpu*.cpp", "shared/isa.cpp"], FLAGS["CPU_FLAGS"]),
        library(INDEX, ["index/*.cpp"], FLAGS["CPU_FLAGS"]),
    ]
    if builds_cuda():
        built.append(library(CUDA, ["*/*.cu"], CUDA_FLAGS))
    return built


if __name__ == "__main__":
    commands = {"build_ext": BuildLibraries, "bdist_wheel": WheelForAnyPython}
    setup(ext_modules=libraries(), cmdclass=commands)
