"""Quantisation of activation rows."""

from jaxmoe.ops.quantize.api import quantize as quantize
from jaxmoe.ops.quantize.reference import dequantize_rows as dequantize_rows
from jaxmoe.ops.quantize.reference import row_scales as row_scales
