"""nvcc compiles the CUDA kernels, and their variables fit in registers. No GPU is needed."""

from pathlib import Path

import pytest

from benchmarks.kernels.cuda_compile import GPUS, SOURCES, compiled
from setup import find_nvcc, gpus, torch_cuda

NVCC = find_nvcc()
KERNELS = {
    "adam/cuda.cu": 3,
    "messages/cuda.cu": 6,
    "quantize/cuda_quantize.cu": 14,
    "quantize/cuda_reduce.cu": 26,
    "shared/cuda_library.cu": 0,
}
MOST_REGISTERS = 128  # of 256 threads, so that two blocks fit


def name_of(source: Path) -> str:
    """The path in csrc/."""
    return "/".join(source.parts[-2:])


needs_nvcc = pytest.mark.skipif(NVCC is None, reason="no nvcc here: CUDA's toolkit has it")


@needs_nvcc
@pytest.mark.parametrize("gpu", GPUS[-1:])  # python -m benchmarks.kernels.cuda_compile: all
@pytest.mark.parametrize("source", SOURCES, ids=name_of)
def test_kernels_spill_no_registers_and_use_no_stack(source, gpu):
    kernels = list(compiled(NVCC, source, gpu))
    assert len(kernels) == KERNELS[name_of(source)]
    for kernel in kernels:
        assert (kernel.stack, kernel.spilled) == (0, 0), kernel
        assert kernel.shared == 0 or source.parts[-2] == "messages", kernel
        assert kernel.registers <= MOST_REGISTERS, kernel


@needs_nvcc
def test_code_for_gpus_that_the_toolkit_knows_and_ptx_for_later_ones():
    flags = gpus(NVCC, only_here=False)
    assert flags[1:] == [
        "-gencode=arch=compute_80,code=sm_80",
        "-gencode=arch=compute_90,code=sm_90",
        "-gencode=arch=compute_90,code=compute_90",
    ]
    assert flags[0].endswith(("sm_70", "sm_75"))


@pytest.mark.parametrize(
    ("line", "version"),
    [("cuda: Optional[str] = '13.0'", "13.0"), ("cuda = '12.6'", "12.6")]
    + [("cuda: Optional[str] = None", None), ("hip = '6.4'", None)],
)
def test_whether_torch_has_cuda_is_read_from_its_version_file(line, version, monkeypatch, tmp_path):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/version.py").write_text(f"__version__ = '2.13.0'\n{line}\nrocm = None\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert torch_cuda() == version
