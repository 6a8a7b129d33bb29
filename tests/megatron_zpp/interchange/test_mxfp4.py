"""Weights in MXFP4: what transformers decodes, and damaged files."""

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, Mxfp4Config

from megatron_zpp.interchange.conversion import export_model, import_model
from megatron_zpp.interchange.mxfp4 import decode
from megatron_zpp.interchange.open_model import load_model, open_model
from tests.megatron_zpp.interchange.foreign_models import (
    ONE_FILE,
    change,
    gpt_oss,
    logits,
    saved,
    set_config,
    tensors_in,
)
from zeropp.errors import InputError

EXPERTS = "model.layers.1.mlp.experts."
BLOCKS, SCALES = EXPERTS + "gate_up_proj_blocks", EXPERTS + "gate_up_proj_scales"


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A gpt-oss whose experts have random numbers in MXFP4, named as the released ones."""
    folder = saved(gpt_oss(hidden_size=64, intermediate_size=32), tmp_path_factory.mktemp("packed"))
    tensors, generator = {}, torch.Generator().manual_seed(1)
    for name, tensor in load_file(folder / ONE_FILE).items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            tensors[name] = tensor.bfloat16()
            continue
        num, inputs, outputs = tensor.shape
        shape = (num, outputs, inputs // 32)
        for end, size, bounds in (
            ("blocks", (*shape, 16), (0, 256)),
            ("scales", shape, (122, 126)),
        ):
            numbers = torch.randint(*bounds, size, generator=generator)
            tensors[f"{name}_{end}"] = numbers.to(torch.uint8)
    save_file(tensors, folder / ONE_FILE, metadata={"format": "pt"})
    set_config(folder, dtype="bfloat16", quantization_config={"quant_method": "mxfp4"})
    return folder


def test_what_transformers_decodes(packed: Path, tmp_path: Path) -> None:
    """The same numbers, exported in the same 16 bit; logits as of the other families."""
    how = {"quantization_config": Mxfp4Config(dequantize=True), "dtype": torch.bfloat16}
    theirs = AutoModelForCausalLM.from_pretrained(packed, **how)
    import_model(packed, tmp_path / "save")
    export_model(open_model(tmp_path / "save"), tmp_path / "back")
    exported, expected = tensors_in(tmp_path / "back"), theirs.state_dict()
    assert exported.keys() == expected.keys()
    for name, tensor in exported.items():
        assert tensor.dtype == torch.bfloat16, name
        assert torch.equal(tensor, expected[name].bfloat16()), name
    before, after = (
        json.loads((folder / "config.json").read_text()) for folder in (packed, tmp_path / "back")
    )
    del before["quantization_config"]
    assert after == before
    ours, _ = load_model(packed)
    torch.testing.assert_close(logits(ours), logits(theirs.float()), rtol=0, atol=1e-5)


def test_every_number_with_every_scale() -> None:
    """A sign, two bits of exponent and one of mantissa; without exponent the mantissa is 1/2."""
    codes, scales = torch.arange(256, dtype=torch.uint8), torch.arange(252, dtype=torch.uint8)
    blocks = codes.view(16, 16)[None].expand(len(scales), -1, -1)
    numbers = decode(blocks, scales[:, None].expand(-1, 16)).view(len(scales), 256, 2)

    def value(code: int) -> float:
        exponent, mantissa = code >> 1 & 3, code & 1
        size = math.ldexp(2 + mantissa, exponent - 2) if exponent else mantissa / 2
        return -size if code & 8 else size

    pairs = torch.tensor([[value(code & 15), value(code >> 4)] for code in range(256)])
    expected = pairs.double() * 2.0 ** (scales.double() - 127)[:, None, None]
    assert torch.equal(numbers.double(), expected)


@pytest.mark.parametrize(
    ("name", "damaged", "message"),
    [
        (BLOCKS, None, "gate_up_proj: of MXFP4 weights there are blocks without scales, or"),
        (SCALES, None, "gate_up_proj: of MXFP4 weights there are blocks without scales, or"),
        (SCALES, lambda scales: scales.float(), "are torch.uint8 and torch.float32; expected byt"),
        (SCALES, lambda scales: scales[:, 1:], r"and scales \[4, 63, 2\]; expected \[matrices, o"),
        (BLOCKS, lambda blocks: blocks[..., :8], r"blocks \[4, 64, 2, 8\] and scales \[4, 64, 2"),
        (SCALES, lambda scales: scales.index_fill(1, torch.tensor([5]), 255), "scales holds 255"),
        (SCALES, lambda scales: scales.index_fill(1, torch.tensor([5]), 254), "weights infinite"),
    ],
)  # fmt: skip
def test_damaged_weights(name: str, damaged, message: str, packed: Path, tmp_path: Path) -> None:
    tensors: dict[str, Tensor] = load_file(packed / ONE_FILE)
    save_file(tensors, tmp_path / ONE_FILE, metadata={"format": "pt"})
    (tmp_path / "config.json").write_text((packed / "config.json").read_text())
    if damaged is None:
        change(tmp_path, (name,))
    else:
        change(tmp_path, **{name.replace(".", "__"): damaged(tensors[name]).contiguous()})
    with pytest.raises(InputError, match=message):
        load_model(tmp_path)


def test_blocks_of_other_sizes_and_without_a_word_about_them(packed: Path, tmp_path: Path) -> None:
    tensors = load_file(packed / ONE_FILE)
    (tmp_path / "config.json").write_text((packed / "config.json").read_text())
    fewer = {BLOCKS: tensors[BLOCKS][:, :62].clone(), SCALES: tensors[SCALES][:, :62].clone()}
    save_file(tensors | fewer, tmp_path / ONE_FILE, metadata={"format": "pt"})
    with pytest.raises(InputError, match=r"gate_up_proj has shape \[4, 64, 62\], expected \[4, 64"):
        open_model(tmp_path)
    save_file(tensors, tmp_path / ONE_FILE, metadata={"format": "pt"})
    set_config(tmp_path, quantization_config=None)
    with pytest.raises(InputError, match="expected floating-point numbers; dequantize"):
        open_model(tmp_path)
