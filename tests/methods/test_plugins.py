"""docs/extend.md as a plugin: its parts train, resume, are inspected and run in experiments, in other processes."""

import re
from pathlib import Path
from typing import Any

import pytest

from helpers import run_psm as psm
from psm.methods import KINDS, METHODS, get_method
from psm.methods.plugins import load_plugins
from psm.utils.errors import UserError

EXTEND = Path(__file__).parents[2] / "docs" / "extend.md"


@pytest.fixture
def plugin(tmp_path: Path) -> Any:
    """The page's code blocks as one file."""
    blocks = re.findall(r"```python\n(.*?)```", EXTEND.read_text(), flags=re.S)
    assert len(blocks) == 6
    path = tmp_path / "my_parts.py"
    path.write_text("\n\n".join(blocks))
    return path


def said(result: Any, code: Any = 0) -> Any:
    assert result.returncode == code, result.stderr + result.stdout
    return " ".join((result.stdout + result.stderr).split())


def test_a_plugin_trains_resumes_evaluates_and_is_inspected(
    plugin: Any, tmp_path: Path, small_arguments: list[str]
) -> None:
    out, given = tmp_path / "run", f"plugins={plugin}"
    begin = ("pretrain", f"out={out}", *small_arguments, "epochs=1", "save.every_steps=1")
    assert "method=mine is unknown" in said(psm(*begin, "method=mine"), 2)
    said(psm(*begin, "method=mine", given))
    assert "positives.rule=centroid is unknown" in said(psm("pretrain", f"out={out}", "resume=true"), 2)
    assert f"give plugins=[{plugin}]" in said(psm("pretrain", f"out={out}", "resume=true"), 2)
    said(psm("pretrain", f"out={out}", "resume=true", given))
    said(psm("evaluate", f"checkpoint={out}", "linear.epochs=1", "progress=false"))
    assert f"give plugins=[{plugin}]" in said(psm("inspect", out), 2)
    said(psm("inspect", out, given, "queries=8", "others=16"))
    page = (out / "inspect.html").read_text()
    assert "PSM with centroids" in page
    assert "mine" in said(psm("methods", given))
    assert "bank rows in the mean" in said(psm("methods", "method=mine", given))


def test_a_plugin_runs_in_an_experiment(plugin: Any, tmp_path: Path) -> None:
    study = tmp_path / "study"
    result = psm(
        "experiment", "run", "figure1", "preset=smoke", f"out={study}", f"plugins={plugin}", "methods=[psm]",
        "weighting.name=hardest", "progress=false",
    )  # fmt: skip
    assert "failed" not in said(result)
    records = list((study / "records").glob("*psm*.json"))
    assert records
    assert "hardest" in records[0].read_text()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "does not exist"),
        ("import nothing_like_it", "cannot be imported: ModuleNotFoundError"),
        ("def f(:", "cannot be imported: SyntaxError"),
        ("import psm\npsm.register_method('simclr', 'mine')", "simclr' is built in"),
    ],
)
def test_a_plugin_that_cannot_be_used_is_named(text: Any, says: str, tmp_path: Path) -> None:
    path = tmp_path / "broken.py"
    if text is not None:
        path.write_text(text)
    before = set(METHODS), {kind: set(parts) for kind, parts in KINDS.items()}
    with pytest.raises(UserError, match=says) as error:
        load_plugins([str(path)])
    assert "broken.py" in str(error.value)
    assert before == (set(METHODS), {kind: set(parts) for kind, parts in KINDS.items()})


def test_a_plugin_is_imported_once(tmp_path: Path) -> None:
    path = tmp_path / "counts.py"
    path.write_text("import psm\npsm.register_method('counted', 'Counted', base='simclr')\n")
    try:
        assert load_plugins([str(path)]) == load_plugins([str(path)]) == [str(path)]
        assert get_method("counted") == get_method("simclr")
    finally:
        METHODS.pop("counted", None)
