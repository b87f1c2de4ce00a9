"""Matrix products of rows grouped by expert with the experts' matrices."""

from jaxmoe.ops.grouped_gemm.api import BACKENDS as BACKENDS
from jaxmoe.ops.grouped_gemm.api import grouped_gemm as grouped_gemm
from jaxmoe.ops.grouped_gemm.api import ragged_gemm as ragged_gemm
from jaxmoe.ops.grouped_gemm.api import row_alignment as row_alignment
