"""Devices that are described: which compilers are here, and what is said where they are not."""

import pytest
from accelerators.bounds import needs

from experiments.lib.cli import UserError
from experiments.lib.targets import described


@pytest.mark.parametrize(
    ("name", "platform", "count"), [("h100", "gpu", 4), ("h100:2x8", "gpu", 16), ("v5e:2x2", "tpu", 4)]
)
def test_a_target_has_its_devices(name, platform, count):
    needs(name)
    devices = described(name)
    assert len(devices) == count
    assert {"cuda": "gpu"}.get(devices[0].platform, devices[0].platform) == platform


@pytest.mark.parametrize("name", ["a100", "h100:2", "h100:x", "v5e", "v5e:a", "v5e:0x2"])
def test_an_unknown_target_is_refused(name):
    with pytest.raises(UserError, match="target must be h100, h100:HOSTSxDEVICES, v5e:AxB"):
        described(name)


def test_a_missing_compiler_is_named(monkeypatch):
    monkeypatch.setattr("experiments.lib.targets.lacks", lambda name: "libtpu")
    with pytest.raises(UserError, match=r"needs the package libtpu; in a clone: pip install"):
        described("v5e:2x2")
