"""Missing kernels are said once, and only where they could have been built."""

import logging
from collections.abc import Iterator

import pytest
import torch

from psm import kernels, ops
from psm.kernels import runtime


@pytest.fixture
def not_built(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process on x86-64 Linux with AVX2 whose psm was installed without a compiler."""
    monkeypatch.setattr(runtime, "_native", None)
    monkeypatch.setattr(runtime, "cpu_capability", lambda: "AVX2")
    monkeypatch.setattr(runtime.sys, "platform", "linux")
    monkeypatch.setattr(runtime.platform, "machine", lambda: "x86_64")
    monkeypatch.delenv("PSM_KERNELS", raising=False)
    for function in (runtime.native_width, runtime.warn_if_not_built):
        function.cache_clear()
    yield
    for function in (runtime.native_width, runtime.warn_if_not_built):
        function.cache_clear()


def run_twice() -> None:
    network = torch.nn.Conv2d(3, 3, 3)
    for _ in range(2):
        with ops.accelerated(network, torch.device("cpu")):
            network(torch.zeros(1, 3, 8, 8))


@pytest.mark.usefixtures("not_built")
def test_missing_kernels_are_said_once(caplog: pytest.LogCaptureFixture) -> None:
    run_twice()
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "install a C compiler" in record.message


@pytest.mark.parametrize("where", ["arm", "macos", "windows", "old cpu", "environment", "disabled", "gpu"])
@pytest.mark.usefixtures("not_built")
def test_nothing_is_said_where_nothing_could_be_built_or_used(
    where: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if where == "arm":
        monkeypatch.setattr(runtime.platform, "machine", lambda: "aarch64")
    elif where in ("macos", "windows"):
        monkeypatch.setattr(runtime.sys, "platform", {"macos": "darwin", "windows": "win32"}[where])
    elif where == "old cpu":
        monkeypatch.setattr(runtime, "cpu_capability", lambda: "DEFAULT")
    elif where == "environment":
        monkeypatch.setenv("PSM_KERNELS", "0")
    if where == "disabled":
        with kernels.disabled():
            run_twice()
    elif where == "gpu":
        with ops.accelerated(torch.nn.Conv2d(3, 3, 3), torch.device("cuda")):
            pass
    else:
        run_twice()
    assert not caplog.records
