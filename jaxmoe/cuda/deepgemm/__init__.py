"""DeepGEMM's kernels as data: which tile (heuristics), what to compile (template), how to launch (specs)."""

from __future__ import annotations

from jaxmoe.cuda.deepgemm.gemm import Config, Gemm
from jaxmoe.cuda.deepgemm.heuristics import choose, theoretical_mk_alignment
from jaxmoe.cuda.deepgemm.prenorm import Prenorm, plan_prenorm
from jaxmoe.cuda.deepgemm.specs import plan_launch

__all__ = ["Config", "Gemm", "Prenorm", "choose", "plan_launch", "plan_prenorm", "theoretical_mk_alignment"]
