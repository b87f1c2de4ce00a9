"""GEMMs without groups: shared experts, the router, the hyper-connection pre-norm."""

from jaxmoe.ops.dense_gemm.api import dense_gemm as dense_gemm
from jaxmoe.ops.dense_gemm.api import prenorm_gemm as prenorm_gemm
