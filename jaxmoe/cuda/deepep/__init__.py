"""DeepEP's kernels between GPUs of one host: how large things are, what is compiled, and what is launched.

Everything here is a pure function of sizes. Buffers and peers are :mod:`jaxmoe.dispatch.deepep`'s.
"""
