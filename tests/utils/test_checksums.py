"""Every changed byte of a sealed record or text is noticed; what carries no checksum is taken as it is."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from psm.utils.checksums import Damaged, is_intact, seal, seal_text, unseal
from psm.utils.files import append_line, read_lines

NAMES = st.sampled_from(["loss", "a b", "é", "", "\ud800", '"'])
VALUES = st.none() | st.booleans() | st.integers() | st.floats() | NAMES | st.lists(st.floats(), max_size=2)
RECORD: dict[str, Any] = {"epoch": 1, "loss": 12.455, "of": "psm", "protocol": {"k": 20, "size": [3, 32]}}


@settings(max_examples=50)
@given(st.dictionaries(NAMES, VALUES | st.dictionaries(NAMES, VALUES, max_size=2), max_size=4))
def test_a_record_comes_back_from_json(record: dict[str, Any]) -> None:
    back = unseal(json.loads(json.dumps(seal(record))))
    assert json.dumps(back) == json.dumps(record)  # as text: NaN is not equal to itself


def test_a_record_without_a_checksum_is_taken_as_it_is() -> None:
    assert unseal(RECORD) == RECORD
    assert unseal(RECORD | {"crc32": ""}) == RECORD  # an emptied cell of a CSV file


def test_every_flipped_byte_of_a_line_is_noticed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "metrics.jsonl"
    append_line(path, RECORD)
    whole = path.read_bytes()
    name = whole.index(b'"crc32"')
    for place in range(len(whole) - 1):
        if name <= place < name + len(b'"crc32"'):
            continue  # a field of another name: the record then has one too many, and no checksum
        damaged = bytearray(whole)
        damaged[place] ^= 0x08
        path.write_bytes(damaged + whole)
        assert read_lines(path) == [RECORD], damaged
    assert "line 1 of" in caplog.text
    assert "damaged and left out" in caplog.text


def test_a_text_is_intact_until_a_byte_of_it_changes() -> None:
    text = "epochs: 200\nseed: 0\n"
    sealed = seal_text(text)
    assert sealed.startswith(text)
    assert is_intact(text)
    assert is_intact(sealed)
    for place in range(len(text)):
        assert not is_intact(sealed[:place] + chr(ord(sealed[place]) ^ 1) + sealed[place + 1 :])


def test_a_changed_value_raises() -> None:
    with pytest.raises(Damaged):
        unseal(seal(RECORD) | {"loss": 12.456})
