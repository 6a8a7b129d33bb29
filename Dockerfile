# An image with both commands and the kernels for GPUs:
#
#   docker build -t megatron-zpp .
#   docker run --rm --gpus all --shm-size 8g -v "$PWD:/work" -w /work megatron-zpp \
#       zeropp --num_ranks 8 --module megatron_zpp.commands pretrain ...
#
# The base needs Python 3.10 or newer and PyTorch 2.11 to 2.14; with nvcc in it (a "devel" image), the
# kernels are compiled.
ARG BASE=pytorch/pytorch:2.11.0-cuda12.8-cudnn9-devel
FROM ${BASE}
WORKDIR /opt/megatron-zpp
COPY pyproject.toml setup.py MANIFEST.in README.md LICENSE ./
COPY csrc csrc
COPY zeropp zeropp
COPY megatron_zpp megatron_zpp
RUN python -m pip install --no-cache-dir . && megatron-zpp --version
WORKDIR /work
