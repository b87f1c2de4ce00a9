"""``jaxmoe doctor`` on several GPUs: who reaches whom."""

from __future__ import annotations

import jax
import pytest

from jaxmoe.commands import doctor
from jaxmoe.cuda import driver


class Device:
    """What a JAX GPU device says of itself."""

    platform, device_kind, compute_capability, core_count = "gpu", "NVIDIA Something", "9.0", 132

    def __init__(self, number: int):
        self.id = self.local_hardware_id = number


class Driver:
    """GPUs 0 and 1 reach each other, 2 reaches nobody."""

    def reaches(self, device: int, peer: int) -> bool:
        return 2 not in (device, peer)


@pytest.mark.parametrize(
    "count, apart, line",
    [
        (1, [], None),
        (2, [], "peers      all GPUs reach each other"),
        (
            3,
            ["gpu:0 gpu:2", "gpu:1 gpu:2", "gpu:2 gpu:0", "gpu:2 gpu:1"],
            "peers      no way: gpu:0 gpu:2, gpu:1 gpu:2, ",
        ),
    ],
)
def test_peers(monkeypatch, tmp_path, count, apart, line):
    monkeypatch.setenv("JAXMOE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(jax, "local_devices", lambda: [Device(n) for n in range(count)])
    monkeypatch.setattr(driver, "driver", Driver)
    report = doctor.examine()
    assert report["apart"] == apart
    text = doctor._text(report)
    assert ("\npeers " in text) == (count > 1) and (line or "") in text
