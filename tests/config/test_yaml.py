"""YAML as psm reads it: plain data, bounded, nothing surprising; what is refused is refused at once, in a sentence."""

import os
from pathlib import Path
from typing import Any

import pytest

from psm.config import merge as settings
from psm.config.schema import PretrainConfig
from psm.config.yaml_text import LARGEST, Plain, read_file, read_text
from psm.utils.errors import UserError


def build(path: Path) -> PretrainConfig:
    return settings.build(PretrainConfig, *settings.parse([f"config={path}"], PretrainConfig))


def written(folder: Path, text: str) -> Path:
    file = folder / "a.yaml"
    file.write_text(text)
    return file


LAUGHS = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "\n".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]" for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (LAUGHS, r"line 2: \*a repeats another part of the file"),
        ("trainer: &t {inner: *t}\n", r"\*t repeats another part"),
        ("views: &v\n  crop_scale: *v\n", r"\*v repeats another part"),
        ("trainer: " + "[" * 100_000, "nested more than 16 levels"),
        ("trainer: " + "{a: " * 10_000, "nested more than 16 levels"),
        ("\n".join("  " * n + "a:" for n in range(300)), "nested more than 16 levels"),
        (f"epochs: {'9' * 5000}\n", r"epochs=9{60}\.\.\. is not finite"),
        (f"trainer: {{max_depth: {'9' * 5000}}}\n", "is not finite"),
        ("epochs: 1e999\n", "is not finite"),
        ("epochs: 3\nepochs: 4\n", "line 2: epochs is set twice"),
        ("optim:\n  lr: 1\n  lr: 2\n", "line 3: lr is set twice"),
        ("optim: {lr: 1}\noptim.lr: 2\n", r"optim\.lr is set twice"),
        ("data: !!python/object/apply:os.system [ls]\n", "the tag .* is not allowed"),
        ("epochs: !!int 3\n", "the tag .* is not allowed"),
        ("? [a, b]\n: 3\n", "a key must be a name"),
        ("epochs: 3\n---\nepochs: 4\n", "more than one document"),
        ("epochs: 0o17\n", "epochs=0o17 is not a whole number"),
        ("epochs: 1:30\n", "epochs=1:30 is not a whole number"),
        ("monitor: {knn: yes}\n", r"monitor\.knn=yes is not true/false"),
        ("monitor: {knn: on}\n", r"monitor\.knn=on is not true/false"),
        ("x\0y: 3\n", "not valid YAML"),
    ],
)
def test_refused(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(UserError, match=says) as error:
        build(written(tmp_path, text))
    assert len(str(error.value)) < 400
    assert "\n" not in str(error.value)


def test_other_files_than_small_regular_ones_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="config=/dev/zero is not a regular file"):
        read_file("/dev/zero")
    with pytest.raises(UserError, match="not a regular file"):
        read_file(tmp_path)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(UserError, match="not a regular file"):
        read_file(pipe)
    large = tmp_path / "large.yaml"
    with large.open("wb") as file:
        file.truncate(LARGEST + 1)
    with pytest.raises(UserError, match="bytes: settings take at most"):
        read_file(large)
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="not text in UTF-8"):
        read_file(binary)
    loop = tmp_path / "loop.yaml"
    loop.symlink_to(loop)
    with pytest.raises(UserError, match="cannot be read"):
        read_file(loop)


def test_text_keys_take_unquoted_values_to_the_letter(tmp_path: Path) -> None:
    config = build(written(tmp_path, "data: no\nencoder: 010\ndevices: 2\nprecision: 1e3\nstrategy: 2024-01-01\n"))
    assert (config.data, config.encoder, config.devices) == ("no", "010", "2")
    assert (config.precision, config.strategy) == ("1e3", "2024-01-01")


def test_numbers_are_decimal(tmp_path: Path) -> None:
    config = build(written(tmp_path, "epochs: 010\nbatch_size: '64'\noptim: {lr: 1e-3, momentum: .5, clip: none}\n"))
    assert (config.epochs, config.batch_size) == (10, 64)
    assert (config.optim.lr, config.optim.momentum, config.optim.clip) == (0.001, 0.5, None)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *(("true", True), ("False", False), ("no", "no"), ("on", "on"), ("y", "y")),
        *(("010", 10), ("-3", -3), ("0x10", "0x10"), ("1_000", "1_000"), ("190:20:30", "190:20:30")),
        *(("1e-4", 1e-4), (".5", 0.5), ("1.", 1.0), ("1e", "1e"), (".", ".")),
        *(("null", None), ("~", None), ("none", "none"), ("2024-01-01", "2024-01-01")),
    ],
)
def test_core_schema(text: str, value: Any) -> None:
    resolved = Plain(text).resolve()
    assert resolved == value
    assert type(resolved) is type(value)


def test_quotes_keep_text() -> None:
    content = read_text("a: '010'\nb: \"true\"\nc: 010", "here")
    assert [type(value) for value in content.values()] == [str, str, Plain]


def test_empty_files_say_nothing(tmp_path: Path) -> None:
    for text in ("", "# nothing\n", "---\n"):
        assert read_file(written(tmp_path, text)) == {}


def test_arguments_are_as_strict_as_files() -> None:
    def parsed(*arguments: str) -> PretrainConfig:
        return settings.build(PretrainConfig, *settings.parse(arguments, PretrainConfig))

    assert parsed("epochs=010").epochs == 10
    assert parsed("data=no").data == "no"
    for argument, says in (
        (f"epochs={'9' * 5000}", "is not finite"),
        (f"views.crop_scale={'[' * 5000}", "nested more than 16 levels"),
        ("views.crop_scale=[&a 1, *a]", "repeats another part"),
        ("trainer.x={a: 1, a: 2}", "a is set twice"),
        ("monitor.knn=yes", "is not true/false"),
        ("epochs=!!int 3", "is not a whole number"),
    ):
        with pytest.raises(UserError, match=says):
            parsed(argument)
    with pytest.raises(UserError, match="epochs is given twice, the second time as epochs=4"):
        parsed("epochs=3", "epochs=4")
