"""The four ops in PyTorch: schemas, fake kernels, compilation, unchanged inputs, errors."""

import pytest
import torch
from torch.library import opcheck

from tests.zeropp.quant.layout_ops import LayoutOps
from tests.zeropp.quant.packed_bytes import any_rows, bits_of
from zeropp.quant import cpu, reference
from zeropp.quant.ops import dequantize, quantize, reduce_dequantize, reduce_quantize
from zeropp.quant.packing import FLOATS, RowLayout

OPS = torch.ops.zeropp
LAYOUT = RowLayout(sizes=(5, 300, 0, 129), bits=(16, 8, 8, 4), wire=torch.float32)
ONTO = RowLayout(sizes=LAYOUT.sizes, bits=(16, 4, 4, 8), wire=torch.bfloat16)
NAMES = ("quantize", "dequantize", "reduce_quantize", "reduce_dequantize")


def rows_of(count: int = 4, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return any_rows(count, LAYOUT.elements, dtype, 1)


def arguments(name: str, dtype: torch.dtype = torch.float32) -> tuple:
    """The arguments of a call of an op, with 4 rows in two groups."""
    packed = quantize(torch.nan_to_num(rows_of()), LAYOUT)
    return {
        "quantize": (rows_of(dtype=dtype), LAYOUT.table, 2),
        "dequantize": (packed, torch.zeros(4, LAYOUT.elements, dtype=dtype), LAYOUT.table, 2),
        "reduce_quantize": (packed, LAYOUT.table, ONTO.table, 2),
        "reduce_dequantize": (packed, torch.zeros(LAYOUT.elements, dtype=dtype), LAYOUT.table),
    }[name]


def on_meta(values: tuple) -> list:
    """The same arguments with tensors that have no data."""
    return [value.to("meta") if isinstance(value, torch.Tensor) else value for value in values]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", NAMES)
def test_opcheck(name, dtype):
    checked = opcheck(getattr(OPS, name).default, arguments(name, dtype))
    assert set(checked.values()) == {"SUCCESS"}


@pytest.mark.parametrize("name", NAMES)
def test_shapes_without_data_are_those_with_data(name):
    real = arguments(name)
    result, expected = getattr(OPS, name)(*on_meta(real)), getattr(OPS, name)(*real)
    if expected is None:
        assert result is None
    else:
        assert result.is_meta
        assert (result.shape, result.dtype) == (expected.shape, expected.dtype)


@pytest.mark.parametrize("name", NAMES)
def test_it_compiles_without_a_break(name):
    op = getattr(OPS, name)
    real = arguments(name)
    compiled = torch.compile(lambda *values: op(*values), backend="aot_eager", fullgraph=True)
    copies = [value.clone() if isinstance(value, torch.Tensor) else value for value in real]
    result, expected = compiled(*copies), op(*real)
    for actual, right in zip([result, *copies], [expected, *real], strict=True):
        if isinstance(actual, torch.Tensor):
            assert torch.equal(comparable(actual), comparable(right))


def comparable(values: torch.Tensor) -> torch.Tensor:
    return bits_of(values) if values.is_floating_point() else values


def test_the_functions_that_take_layouts_compile_without_a_break():
    def there_and_back(rows: torch.Tensor) -> torch.Tensor:
        packed = quantize(rows, LAYOUT, fold=2)
        out, total = torch.empty_like(rows), rows.new_empty(LAYOUT.elements)
        dequantize(packed, out, LAYOUT, fold=2)
        reduce_dequantize(reduce_quantize(packed, LAYOUT, ONTO, terms=2), total, ONTO)
        return torch.cat((out, total[None]))

    rows = torch.nan_to_num(rows_of())
    compiled = torch.compile(there_and_back, backend="aot_eager", fullgraph=True)
    assert torch.equal(bits_of(compiled(rows)), bits_of(there_and_back(rows)))


@pytest.mark.parametrize("backend", [lambda: reference, cpu.backend], ids=["reference", "cpu"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_inputs_are_left_as_they_are(dtype, backend):
    """In fp32 `.float()` is the tensor itself: what is done to it in place is done to the input."""
    functions = LayoutOps(backend())
    for bits in (4, 8, 16):
        layout = RowLayout(sizes=(300,), bits=(bits,), wire=dtype)
        rows = any_rows(4, 300, dtype, bits)
        before = rows.clone()
        packed = functions.quantize(rows, layout, 1)
        assert torch.equal(bits_of(rows), bits_of(before))
        assert packed.untyped_storage().data_ptr() != rows.untyped_storage().data_ptr()
        packed_before = packed.clone()
        functions.dequantize(packed, torch.empty_like(rows), layout, 1)
        functions.reduce_dequantize(packed, torch.empty(300), layout)
        sums = functions.reduce_quantize(packed, layout, layout, 1)
        assert torch.equal(packed, packed_before)
        assert sums.untyped_storage().data_ptr() != packed.untyped_storage().data_ptr()


def test_rows_of_nothing():
    for count in (0, 2):
        empty = RowLayout(sizes=(0, 0), bits=(8, 16), wire=torch.bfloat16)
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
    ("call", "error", "message"),
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
                PACKED, LAYOUT, RowLayout(sizes=(434,), bits=(8,), wire=torch.float32), terms=1
            ),
            ValueError,
            "the layouts differ",
        ),
    ],
)
def test_arguments_that_do_not_fit_together_are_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("name", NAMES)
def test_fake_tensors_are_refused_alike(name):
    packed, *others = on_meta(arguments(name))
    with pytest.raises(ValueError, match="has shape"):
        getattr(OPS, name)(packed[:, 1:], *others)
