"""The four ops as PyTorch sees them: schema, shapes without data, untouched inputs, errors."""

import pytest
import torch
from torch.library import opcheck

from tests.zeropp.quant.packed_rows import any_rows, bits_of
from zeropp.quant import ops
from zeropp.quant.packing import FLOATS, Layout
from zeropp.quant.quantize import dequantize, quantize, reduce_dequantize, reduce_quantize

OPS = torch.ops.zeropp
LAYOUT = Layout(sizes=(5, 300, 0, 129), bits=(16, 8, 8, 4), wire=torch.float32)
ONTO = Layout(sizes=LAYOUT.sizes, bits=(16, 4, 4, 8), wire=torch.bfloat16)
FIELDS = (LAYOUT.sizes, LAYOUT.bits, LAYOUT.wire)
NAMES = ("quantize", "dequantize", "reduce_quantize", "reduce_dequantize")


def rows_of(count: int = 4, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return any_rows(count, LAYOUT.elements, dtype, 1)


def arguments(name: str, dtype: torch.dtype = torch.float32) -> tuple:
    """Of a call of the op by its name, with 4 rows in twos."""
    packed = quantize(torch.nan_to_num(rows_of()), LAYOUT)
    return {
        "quantize": (rows_of(dtype=dtype), *FIELDS, 2),
        "dequantize": (packed, torch.zeros(4, LAYOUT.elements, dtype=dtype), *FIELDS, 2),
        "reduce_quantize": (packed, *FIELDS, ONTO.bits, ONTO.wire, 2),
        "reduce_dequantize": (packed, torch.zeros(LAYOUT.elements, dtype=dtype), *FIELDS),
    }[name]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", NAMES)
def test_opcheck(name, dtype):
    checked = opcheck(getattr(OPS, name).default, arguments(name, dtype))
    assert set(checked.values()) == {"SUCCESS"}


@pytest.mark.parametrize("name", NAMES)
def test_shapes_without_data_are_those_with_data(name):
    real = arguments(name)
    meta = [one.to("meta") if isinstance(one, torch.Tensor) else one for one in real]
    found, expected = (getattr(OPS, name)(*given) for given in (meta, real))
    if expected is None:
        assert found is None
    else:
        assert found.is_meta
        assert (found.shape, found.dtype) == (expected.shape, expected.dtype)


@pytest.mark.parametrize("name", NAMES)
def test_it_compiles_without_a_break(name):
    op = getattr(OPS, name)
    real = arguments(name)
    compiled = torch.compile(lambda *given: op(*given), backend="aot_eager", fullgraph=True)
    again = [one.clone() if isinstance(one, torch.Tensor) else one for one in real]
    found, expected = compiled(*again), op(*real)
    for own, other in zip([found, *again], [expected, *real], strict=True):
        if isinstance(own, torch.Tensor):
            own, other = (bits_of(one) if one.is_floating_point() else one for one in (own, other))
            assert torch.equal(own, other)


@pytest.mark.parametrize("backend", [ops.anywhere, ops.on_cpu])
@pytest.mark.parametrize("dtype", FLOATS)
def test_inputs_are_left_as_they_are(dtype, backend):
    """In fp32 `.float()` is the tensor itself: what is done to it in place is done to the input."""
    used = backend()
    for bits in (4, 8, 16):
        layout = Layout(sizes=(300,), bits=(bits,), wire=dtype)
        rows = any_rows(4, 300, dtype, bits)
        before = rows.clone()
        packed = used.quantize(rows, layout, 1)
        assert torch.equal(bits_of(rows), bits_of(before))
        assert packed.untyped_storage().data_ptr() != rows.untyped_storage().data_ptr()
        kept = packed.clone()
        used.dequantize(packed, torch.empty_like(rows), layout, 1)
        used.reduce_dequantize(packed, torch.empty(300), layout)
        sums = used.reduce_quantize(packed, layout, layout, 1)
        assert torch.equal(packed, kept)
        assert sums.untyped_storage().data_ptr() != packed.untyped_storage().data_ptr()


def test_rows_of_nothing():
    for count in (0, 2):
        empty = Layout(sizes=(0, 0), bits=(8, 16), wire=torch.bfloat16)
        packed = quantize(torch.empty(count, 0), empty)
        assert packed.shape == (count, 0)
        dequantize(packed, torch.empty(count, 0), empty)
        assert reduce_quantize(packed, empty, empty, terms=1).shape == (count, 0)
    assert quantize(torch.empty(0, LAYOUT.elements), LAYOUT).shape == (0, LAYOUT.packed_bytes)
    nothing = torch.empty(0, LAYOUT.packed_bytes, dtype=torch.uint8)
    assert reduce_quantize(nothing, LAYOUT, ONTO, terms=3).shape == (0, ONTO.packed_bytes)
    total = torch.ones(LAYOUT.elements)
    reduce_dequantize(nothing, total, LAYOUT)
    assert (total == 0).all()


def test_gradients_do_not_pass():
    rows = torch.ones(1, LAYOUT.elements, requires_grad=True)
    assert not quantize(rows, LAYOUT).requires_grad


PACKED = torch.zeros(4, LAYOUT.packed_bytes, dtype=torch.uint8)
OUT = torch.zeros(4, LAYOUT.elements)


@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        (lambda: quantize(OUT.double(), LAYOUT), TypeError, "rows is torch.float64; give bf"),
        (lambda: quantize(OUT.int(), LAYOUT), TypeError, "rows is torch.int32"),
        (lambda: quantize(OUT[:, 1:].clone(), LAYOUT), ValueError, r"needs \(any, 434\)"),
        (lambda: quantize(OUT[0], LAYOUT), ValueError, r"shape \(434,\)"),
        (lambda: quantize(OUT.t().contiguous().t(), LAYOUT), ValueError, "give a contiguous"),
        (lambda: quantize(OUT, LAYOUT, fold=3), ValueError, "fold is 3; it must divide the 4"),
        (lambda: quantize(OUT, LAYOUT, fold=0), ValueError, "fold is 0"),
        (lambda: dequantize(PACKED.char(), OUT, LAYOUT), TypeError, "packed is torch.int8"),
        (lambda: dequantize(PACKED, OUT.double(), LAYOUT), TypeError, "out is torch.float64"),
        (lambda: dequantize(PACKED[:, 16:].clone(), OUT, LAYOUT), ValueError, "packed has shape"),
        (lambda: dequantize(PACKED, OUT[:2], LAYOUT), ValueError, r"needs \(4, 434\)"),
        (lambda: dequantize(PACKED, OUT.t().contiguous().t(), LAYOUT), ValueError, "out has str"),
        (lambda: dequantize(PACKED, OUT, LAYOUT, fold=3), ValueError, "fold is 3"),
        (lambda: dequantize(PACKED, OUT.to("meta"), LAYOUT), ValueError, "on cpu and out on meta"),
        (lambda: reduce_quantize(PACKED, LAYOUT, ONTO, terms=3), ValueError, "terms is 3; it must"),
        (lambda: reduce_quantize(PACKED, LAYOUT, ONTO, terms=0), ValueError, "terms is 0"),
        (lambda: reduce_dequantize(PACKED, OUT, LAYOUT), ValueError, r"needs \(434\)"),
        (
            lambda: reduce_quantize(
                PACKED, LAYOUT, Layout(sizes=(434,), bits=(8,), wire=torch.float32), terms=1
            ),
            ValueError,
            "the layouts differ",
        ),
        (lambda: OPS.quantize(OUT, [434], [5], torch.float32, 1), ValueError, "bits 5"),
    ],
)
def test_what_does_not_fit_is_refused(call, error, said):
    with pytest.raises(error, match=said):
        call()


@pytest.mark.parametrize("name", NAMES)
def test_without_data_the_same_is_refused(name):
    real = [one.to("meta") if isinstance(one, torch.Tensor) else one for one in arguments(name)]
    with pytest.raises(ValueError, match="has shape"):
        getattr(OPS, name)(real[0][:, 1:], *real[1:])
