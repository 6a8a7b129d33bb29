from zeropp.quant.ops import dequantize as dequantize
from zeropp.quant.ops import quantize as quantize
from zeropp.quant.packing import RAW as RAW
from zeropp.quant.packing import RowLayout as RowLayout
from zeropp.quant.packing import row_layout as row_layout
