"""Two processes of two devices each find each other's buffers through the store of jax.distributed."""

from __future__ import annotations

import json
import pathlib

from jaxmoe.testing.ranks import run_ranks

SCRIPT = pathlib.Path(__file__).with_name("deepep_handshake.py")


def run(standin, tokens: tuple[int, int]) -> list[dict]:
    env = {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
        "PYTHONPATH": str(SCRIPT.parents[2]),
        "JAXMOE_LIBCUDA": standin.driver._name,
        "JAXMOE_FFI_LIBRARY": str(standin.library.path),
    }
    ranks = run_ranks([SCRIPT, *tokens], 2, env=env, seconds=120)
    assert [rank.code for rank in ranks] == [0, 0], [rank.err[-2000:] for rank in ranks]
    return [json.loads(rank.out.splitlines()[-1]) for rank in ranks]


def test_tables_hold_each_others_buffers(standin):
    said = run(standin, (16, 16))
    assert said[0]["error"] is said[1]["error"] is None and said[0]["context"] == said[1]["context"] == 2
    addresses = [{int(i): a for i, a in s["own"].items()} for s in said]
    order = [*addresses[0].items(), *addresses[1].items()]
    for rank, process in enumerate(said):
        for table in process["tables"].values():
            # the driver opens a handle 4096 bytes behind what it was made of
            assert table == [a + (0 if i in addresses[rank] else 4096) for i, a in order]


def test_processes_that_make_different_contexts_say_so(standin):
    for rank, process in enumerate(run(standin, (16, 24))):
        assert "makes another context than process" in process["error"], (rank, process)
        assert "every process must make the same ones in the same order" in process["error"]
