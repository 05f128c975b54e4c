"""Configuration: merging, types, and mistakes answered in a sentence that names the nearest valid key."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from psm.config import merge as settings
from psm.config.schema import PretrainConfig
from psm.utils.errors import UserError


def build(*arguments: str) -> PretrainConfig:
    return settings.build(PretrainConfig, *settings.parse(arguments, PretrainConfig))


def test_types_and_nesting() -> None:
    config = build(
        "epochs=3", "optim.lr=1e-2", "views.crop_scale=[0.3,1]", "images.size=none", "devices=2", "resume=true"
    )
    assert (config.epochs, config.optim.lr, config.views.crop_scale) == (3, 0.01, [0.3, 1.0])
    assert (config.images.size, config.devices, config.resume) == (None, "2", "true")
    assert build("epochs=1e1").epochs == 10


def test_text_is_taken_to_the_letter() -> None:
    assert build("images.labels=none").images.labels == "none"
    assert build("images.cache=none").images.cache is None
    assert build("data=/a: b/[c]").data == "/a: b/[c]"
    assert build("out=1e3").out == "1e3"
    assert build("out=${x}").out == "${x}"
    assert build("plugins=a: b.py").plugins == ["a: b.py"]
    assert build("plugins=[a.py,b.py]").plugins == ["a.py", "b.py"]


def test_file_then_arguments(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("epochs: 7\noptim: {lr: 0.3, momentum: 0.5}\n")
    config = build(f"config={file}", "optim.lr=0.2")
    assert (config.epochs, config.optim.lr, config.optim.momentum) == (7, 0.2, 0.5)
    assert build("optim.lr=0.2", f"config={file}").optim.lr == 0.2


def test_round_trip(tmp_path: Path) -> None:
    config = build("views.crop_scale=[0.5,1]", "trainer.max_steps=4", "loggers=[csv]", "optim.clip=1")
    file = tmp_path / "a.yaml"
    file.write_text(settings.to_yaml(config))
    assert build(f"config={file}") == config


def test_python_dictionaries_and_dotted_keys() -> None:
    config = settings.build(PretrainConfig, {"positives": {"k": 3}, "optim.lr": 0.5})
    assert (config.positives, config.optim.lr) == ({"k": 3}, 0.5)


def test_values_of_numpy_and_paths() -> None:
    given: dict[str, Any] = {
        "epochs": np.int64(3),
        "optim.lr": np.float32(0.5),
        "views.crop_scale": np.array([0.5, 1.0]),
        "data": Path("a"),
    }
    config = settings.build(PretrainConfig, given)
    assert (config.epochs, config.optim.lr, config.views.crop_scale, config.data) == (3, 0.5, [0.5, 1.0], "a")
    assert type(config.epochs) is int
    with pytest.raises(UserError, match="epochs is given more than 63 bits"):
        settings.build(PretrainConfig, {"epochs": 10**5000})


def test_defaults_are_not_shared() -> None:
    settings.build(PretrainConfig).callbacks.append("a.B")
    settings.build(PretrainConfig).loggers["csv"] = {}
    assert settings.build(PretrainConfig).callbacks == []
    assert settings.build(PretrainConfig).loggers == {}


@pytest.mark.parametrize(
    ("argument", "says"),
    [
        ("epoch=3", "did you mean 'epochs'"),
        ("optim.l=3", r"did you mean 'optim\.lr'"),
        ("positive.k=3", "did you mean 'positives.k'"),
        ("save.snapshot_every=1", r"did you mean 'save\.snapshots'"),
        ("save.q=1", r"save has save\.every_steps"),
        ("optim.learning_rate=1", r"write optim\.lr"),
        ("zzz=3", "psm pretrain --help"),
        ("optim.lr=nan", "optim.lr=nan is not finite"),
        ("views.crop_scale=[0.1,.inf]", "is not finite"),
        ("epochs=x", "epochs=x is not a whole number"),
        ("epochs=1.5", "epochs=1.5 is not a whole number"),
        ("epochs=", "epochs= is not a whole number"),
        ("epochs=true", "epochs=true is not a whole number"),
        ("monitor.knn=1", r"monitor\.knn=1 is not true/false"),
        ("optim.lr=fast", "optim.lr=fast is not a number"),
        ("monitor.knn=maybe", "monitor.knn=maybe is not true/false"),
        ("views.crop_scale=3", "views.crop_scale=3 is not a list of numbers"),
        ("views=3", "views is a group of keys"),
        ("--epochs", "is not key=value"),
        ("trainer=3", r"write trainer\.KEY=VALUE"),
        ("config=/does/not/exist.yaml", "cannot be read"),
    ],
)
def test_mistakes(argument: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        build(argument)


def test_unknown_key_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("optim: {lrr: 0.3}\n")
    with pytest.raises(UserError, match=r"did you mean 'optim\.lr'"):
        build(f"config={file}")
    file.write_text("- a\n- b\n")
    with pytest.raises(UserError, match="must hold keys and values"):
        build(f"config={file}")
    file.write_text("a: [")
    with pytest.raises(UserError, match="not valid YAML"):
        build(f"config={file}")


@pytest.mark.parametrize("name", ["out", "overwrite", "resume", "progress"])
def test_a_file_describes_a_run_and_not_one_call(tmp_path: Path, name: str) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(f"epochs: 3\n{name}: true\n")
    with pytest.raises(UserError, match=f"sets {name}, which is about one call"):
        build(f"config={file}")
    assert name not in settings.to_dict(PretrainConfig(out="a"))
