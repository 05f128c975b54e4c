"""Trained encoders on disk: what loading imports, and that encoder.json's lines do load them."""

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import psm
from helpers import SMALL
from psm.utils.errors import UserError

# Modules that loading an encoder must not import: the trainer, and whatever locks files.
UNWANTED = ("lightning", "psm.training", "psm.utils.locking", "psm.utils.run_lock")


@pytest.fixture(scope="module", params=["cifar", "imagenet"])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of ResNet-18 with either stem."""
    settings: dict[str, Any] = SMALL | {
        "encoder": "resnet18",
        "stem": request.param,
        "epochs": 1,
        "images": {"limit": 32, "size": 16},
    }
    settings |= {"batch_size": 16, "monitor": {"knn": False}}
    return psm.pretrain(tmp_path_factory.mktemp("runs") / "a", **settings).out


def test_the_lines_of_encoder_json_load_the_encoder(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trained weights load into torchvision's ResNet with strict=True and give the same features."""
    lines = json.loads((run / "encoder.json").read_text())["how_to_load"]
    monkeypatch.chdir(run)
    names: dict[str, Any] = {}
    exec("\n".join(lines), names)
    assert type(names["net"]).__module__.startswith("torchvision.")
    images = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    expected = psm.load_encoder(run)(images)
    assert torch.equal(names["encoder"](images), expected)
    torch.testing.assert_close(names["net"].eval()(images), expected)


def test_loading_imports_neither_the_trainer_nor_a_lock(run: Path) -> None:
    code = (
        "import sys, psm; assert 'torch' not in sys.modules; "
        "encoders = [psm.load_encoder(path) for path in sys.argv[1:]]; "
        f"print([name for name in sys.modules if name.startswith({UNWANTED!r})], len(encoders))"
    )
    command = [sys.executable, "-c", code, str(run), str(run / "checkpoints" / "last.ckpt")]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert output.strip() == "[] 2"


def test_a_checkpoint_and_the_encoder_file_hold_the_same_weights(run: Path) -> None:
    finished, checkpoint = psm.load_encoder(run), psm.load_encoder(run / "checkpoints" / "last.ckpt")
    assert finished.info == checkpoint.info
    assert not finished.training
    for name, value in finished.state_dict().items():
        assert torch.equal(value, checkpoint.state_dict()[name])


@pytest.mark.parametrize("name", ["encoder.safetensors", "checkpoints/last.ckpt"])
def test_flipped_bytes_are_noticed(tmp_path: Path, small: dict[str, Any], name: str) -> None:
    """Anywhere among the weights: neither format checks them itself."""
    run = psm.pretrain(tmp_path / "a", **small)
    path = run.out / name
    whole = path.read_bytes()
    generator = random.Random(0)
    for _ in range(20):
        place = generator.randrange(len(whole) // 4, 3 * len(whole) // 4)
        damaged = bytearray(whole)
        for index in range(place, place + 64):
            damaged[index] ^= 0xFF
        path.write_bytes(damaged)
        with pytest.raises(UserError, match="is damaged"):
            psm.load_encoder(path)
    path.write_bytes(whole)
    psm.load_encoder(path)
