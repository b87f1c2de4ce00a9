"""Everything that touches CUDA from Python: find headers, compile kernels, describe and launch them."""
