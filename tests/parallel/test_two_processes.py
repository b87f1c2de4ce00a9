"""Attention DP × EP over two processes of two devices each: jax.distributed, collectives by gloo."""

from __future__ import annotations

import pathlib

from jaxmoe.testing.ranks import run_ranks

SCRIPT = pathlib.Path(__file__).with_name("two_processes.py")
SECONDS = 240


def test_two_processes_give_what_one_gives():
    """Output and all gradients; 4 devices, 2 experts each."""
    env = {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
        "PYTHONPATH": str(SCRIPT.parents[2]),
    }
    for rank in run_ranks([SCRIPT], 2, env=env, seconds=SECONDS):
        assert rank.code == 0 and "equal 7" in rank.out, rank.out + rank.err
