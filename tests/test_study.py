"""README, findings and the pages of the study agree, number by number."""

import runpy
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_pages_have_the_numbers_of_the_study() -> None:
    command = [sys.executable, str(ROOT / "study" / "publish.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_number_that_the_study_does_not_have_is_found() -> None:
    publish = runpy.run_path(str(ROOT / "study" / "publish.py"))
    assert list(publish["unknown_numbers"]("49.6 ± 0.9 and 49.7 ± 0.9", {"49.6 ± 0.9"})) == ["49.7 ± 0.9"]
    table = publish["tables"]()["table1", "cifar10"]
    marked = "<!-- study: table1 cifar10 -->\nold\n<!-- end -->"
    assert "old" not in publish["published"](marked, {("table1", "cifar10"): table})


def test_a_score_that_a_method_does_not_have_is_found() -> None:
    publish = runpy.run_path(str(ROOT / "study" / "publish.py"))
    known = {"PSM v2": {"67.5"}, "PSM": {"63.0"}, "HCL": {"67.6"}}
    text = "HCL 67.6, PSM 63.0; PSM v2 is at 67.4 beside HCL's 63.0 <!-- outside the study -->PSM 40.2<!-- end -->"
    assert list(publish["unknown_scores"](text, known)) == ["PSM v2 67.4", "HCL 63.0"]
    assert {"HCL", "SimCLR", "PSM"} <= publish["scores_of_methods"]().keys()
