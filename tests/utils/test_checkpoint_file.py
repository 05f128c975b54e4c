"""Checkpoints are read without running code, and other files are refused in a sentence."""

import zipfile
from pathlib import Path

import pytest
import torch

from psm.utils.checkpoint_file import read_checkpoint
from psm.utils.errors import UserError

DESCRIPTION = {"config": {}, "encoder_info": {}, "images": 3}
WHOLE = {"psm": DESCRIPTION, "state_dict": {"weights": torch.ones(2)}, "global_step": 5}


class Attack:
    """Runs code when it is unpickled."""

    def __reduce__(self) -> tuple:
        return exec, ("raise SystemExit('code was run')",)


def test_a_checkpoint_comes_back(tmp_path: Path) -> None:
    torch.save(WHOLE, tmp_path / "a.ckpt")
    assert torch.equal(read_checkpoint(tmp_path / "a.ckpt")["state_dict"]["weights"], torch.ones(2))


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ({"psm": DESCRIPTION, "attack": Attack()}, "holds more than tensors and plain values"),
        ({"state_dict": {}}, "is not a checkpoint written by psm"),
        ({"psm": {"config": {}}}, "is not a checkpoint written by psm"),
        ({"psm": DESCRIPTION, "global_step": 5}, "is not a checkpoint written by psm"),
        (WHOLE | {"state_dict": {"a": 3}}, "is not a checkpoint written by psm"),
        (WHOLE | {"global_step": "5"}, "is not a checkpoint written by psm"),
        (WHOLE | {"psm": DESCRIPTION | {"encoder_info": None}}, "is not a checkpoint written by psm"),
        ([1, 2], "is not a checkpoint written by psm"),
    ],
)
def test_other_contents_are_refused(tmp_path: Path, content: object, says: str) -> None:
    torch.save(content, tmp_path / "a.ckpt")
    with pytest.raises(UserError, match=says):
        read_checkpoint(tmp_path / "a.ckpt")


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    torch.save({"psm": DESCRIPTION}, tmp_path / "a.ckpt")
    whole = (tmp_path / "a.ckpt").read_bytes()
    for content in (b"", whole[: len(whole) // 2], b"hello world"):
        (tmp_path / "a.ckpt").write_bytes(content)
        with pytest.raises(UserError, match="checkpoint"):
            read_checkpoint(tmp_path / "a.ckpt")
    with pytest.raises(UserError, match="give another file"):
        read_checkpoint(tmp_path / "none.ckpt")


def test_a_pickle_cut_off_under_right_checksums_is_refused(tmp_path: Path) -> None:
    """torch fails in many ways on such files, struct.error among them."""
    file, other = tmp_path / "a.ckpt", tmp_path / "b.ckpt"
    torch.save(WHOLE, file)
    with zipfile.ZipFile(file) as whole:
        members = {name: whole.read(name) for name in whole.namelist()}
    pickled = next(name for name in members if name.endswith("data.pkl"))
    for end in range(2, len(members[pickled]), 3):
        with zipfile.ZipFile(other, "w") as cut:
            for name, content in members.items():
                cut.writestr(name, content[:end] + b"r" if name == pickled else content)
        with pytest.raises(UserError):
            read_checkpoint(other)
