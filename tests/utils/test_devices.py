"""What a step may do on an accelerator, tested on torch's meta device, which has shapes but no numbers to wait for."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import psm.losses.chunked
import psm.utils.devices
from helpers import linux_threads, native_threads, using
from psm.config.schema import OptimConfig, ViewsConfig
from psm.data import ImageStore
from psm.data.loader import BatchLoader
from psm.methods import METHODS, get_method
from psm.mining.memory_bank import MemoryBank
from psm.models.factory import create_encoder
from psm.models.heads import prediction_head, projection_head
from psm.models.siamese import SiameseNetworks
from psm.training.module import step_loss
from psm.training.optim import build_optimizer
from psm.training.run_module import RunningMean
from psm.utils.errors import UserError
from psm.views.transform import Views

DEVICE = torch.device("meta")


class Copies(TorchDispatchMode):
    """Counts the copies between the host and the device."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        sides = {x.device.type for x in (result, *args) if isinstance(x, torch.Tensor)}
        self.count += len(sides) > 1 and "copy" in function.__name__
        return result


def make(method: Any, chunk: Any = None) -> Any:
    spec = get_method(method)
    with DEVICE:
        backbone = create_encoder("tiny", "cifar", 16)
        head = prediction_head() if spec.predictor.enabled else None
        networks = SiameseNetworks(backbone, projection_head(backbone.width), head, spec.target.enabled)
        bank = MemoryBank(512, 128)
        bank.enqueue(torch.empty(512, 128), torch.arange(512))
        meter = RunningMean(("loss", *spec.metric_names))
        images = torch.zeros(8, 3, 16, 16, dtype=torch.uint8)
    learned = [p for p in networks.parameters() if p.requires_grad]
    optimizer = build_optimizer(learned, OptimConfig(weight_decay=1e-3))
    views = Views(ViewsConfig(blur=0.5, solarize=0.2), 16, (0.5,) * 3, (0.2,) * 3)

    def step() -> Any:
        draws = views.sample_params(8, torch.Generator().manual_seed(0), device=DEVICE)
        given = views.apply(images, draws, channels_last=True)
        ids = torch.arange(8, device=DEVICE)
        loss, facts, latest = step_loss(networks, given, ids, get_method(method), bank, None, chunk)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        networks.update_target(spec.target.momentum)
        bank.enqueue(latest.keys, latest.ids)
        meter.update({"loss": loss.detach(), **facts})
        return loss

    return step


@pytest.mark.parametrize("method", METHODS)
def test_a_step_never_waits_for_the_device(method: str) -> None:
    """Reading a number or the number of hits off the meta device is an error, and so is mixing it with the host's."""
    step = make(method)
    step()  # constants are copied once
    with Copies() as copies:
        assert step().device == DEVICE
    assert copies.count == 1, "beside the draws of the views nothing is copied to the device"


@pytest.mark.parametrize("method", ["psm", "mocov2"])
def test_chunks_and_slices_wait_for_nothing_either(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psm.losses.chunked, "DEVICE_PAIRS_SHARE", 1e-8)
    assert psm.losses.chunked.anchors_at_once(16, DEVICE) < 8
    step = make(method, chunk=4)
    step()
    with Copies() as copies:
        step()
    assert copies.count == 1


def test_the_meta_device_would_notice() -> None:
    """The test above can fail: what waits for a device raises here."""
    values = torch.ones(4, device=DEVICE)
    for wait in (
        lambda: values.sum().item(),
        lambda: values.nonzero(),
        lambda: values[values > 0],
        lambda: bool(values[0]),
    ):
        with pytest.raises((RuntimeError, NotImplementedError)):
            wait()
    with Copies() as copies:
        torch.ones(3).to(DEVICE)
    assert copies.count == 1


def images(count: Any = 20) -> Any:
    return ImageStore(
        torch.randint(0, 256, (count, 3, 4, 4), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    )


def test_images_on_a_device_are_taken_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psm.utils.devices, "free_bytes", lambda device: 10**9)
    batches = BatchLoader(images(), 8, seed=3, device="meta")
    iterator = iter(batches)
    first = next(iterator)
    with Copies() as copies:
        batch = next(iterator)
    assert copies.count == 0
    assert first.images.device == batch.ids.device == DEVICE
    assert batch.images.shape == (8, 3, 4, 4)


def test_mapped_images_that_fit_are_held_there_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psm.utils.devices, "free_bytes", lambda device: 10**9)
    monkeypatch.setattr(ImageStore, "mapped", True)
    batches = BatchLoader(images(), 8, seed=3, device="meta")
    assert batches.on_device is not None
    assert batches.on_device.shape == (20, 3, 4, 4)
    assert next(iter(batches)).images.device == DEVICE


def test_the_precision_that_auto_stands_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: True)
    assert psm.utils.devices.find_precision("auto") == "bf16-mixed"
    assert psm.utils.devices.find_precision("cpu") == "32-true"
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: False)
    assert psm.utils.devices.find_precision("gpu") == "32-true"


def test_the_device_that_a_name_stands_for_and_one_that_is_not_there() -> None:
    assert psm.utils.devices.find_device("cpu") == torch.device("cpu")
    assert psm.utils.devices.find_device("auto").type in ("cpu", "cuda", "mps")
    if not torch.cuda.is_available():
        with pytest.raises(UserError, match=r"accelerator=gpu cannot be used here: give one of auto, .*cpu"):
            psm.utils.devices.find_device("gpu")


@linux_threads
def test_a_second_team_of_threads_is_there_while_threads_that_wait_must_sleep() -> None:
    with using(2):
        torch.ones(2**17).sum()  # the team of this thread
        before = native_threads()
        with psm.utils.devices.idle_threads_sleep():
            assert len(native_threads() - before) == 2  # the thread, and the other one of its team
