"""What the benchmarks share is part of the package, where ``jaxmoe bench`` uses it too."""

from jaxmoe.bench.timing import copy_rate, kernel_seconds, machine, matmul_rate, seconds, table

__all__ = ["copy_rate", "kernel_seconds", "machine", "matmul_rate", "seconds", "table"]
