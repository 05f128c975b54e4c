"""Methods over steps, and what the index of a study says first."""

from pathlib import Path

import pytest

from experiments.records import plan, record_of
from psm.experiments.aggregate import headline, load_results
from psm.experiments.answer import answer
from psm.experiments.report import write_report
from psm.experiments.results import Study, add_entries, collect_records, write_record

LINEAR = {"psm": 60.0, "simclr": 61.0, "hcl": 63.0, "snclr": 59.0, "byol": 55.0, "psmv2": 65.0}


def test_a_schedule_of_all_epochs_is_the_run_of_the_tables() -> None:
    found = plan("schedules", preset="overnight", seeds=[0])
    epochs = sorted(run.epochs for run in found.runs)
    assert epochs == [5] * 6 + [20] * 6
    of_tables = {run.name for run in plan("table1", "successor", preset="overnight", seeds=[0]).runs}
    assert {run.name for run in found.runs if run.epochs == 20} <= of_tables


@pytest.fixture
def study(tmp_path: Path) -> Study:
    """Six methods with two seeds; more epochs and more views help, PSM v2 leads."""
    found = plan("schedules", "successor", preset="smoke", epochs=8, seeds=[0, 1])
    study = Study(tmp_path / "study")
    add_entries(study, found.entries)
    for run in found.runs:
        linear = LINEAR[run.method] + 0.1 * run.seed - (0 if run.epochs == 8 else 10)
        linear += 4 * (run.settings.get("views.count") == 4) - 0.5 * (run.settings.get("positives.k") == 0)
        write_record(study.record(run.name, run.evaluation_hash), record_of(run, linear, linear - 3))
    collect_records(study)
    return study


def test_the_order_is_said_for_each_number_of_steps(study: Study) -> None:
    (result,) = [result for result in load_results(study) if result.name == "schedules"]
    steps = 115 // 32
    (sentence,) = headline(result)
    assert f"fter {2 * steps} steps PSM v2 55.05" in sentence
    assert f"after {8 * steps} steps PSM v2 65.05" in sentence
    assert sentence.index("HCL 63.05") < sentence.index("SimCLR 61.05") < sentence.index("PSM 60.05")


def test_the_index_leads_with_the_answer_and_a_chart_over_steps(study: Study) -> None:
    first, second = answer(load_results(study))
    assert first.startswith("PSM is number 3 of 5 methods on Shapes after 24 steps, by a linear layer, with 60.05 ± ")
    assert "; HCL leads with 63.05 ± " in first
    assert "has 65.05 ± " in second
    assert "+2.00 ± 0.00 points from HCL, clear of zero over 2 seeds; with four views" in second
    assert "+6.00 ± 0.00 points from HCL, clear of zero over 2 seeds; without its mined" in second
    assert "; without its mined positives it has 68.55" in second
    assert "; HCL with as many views has 67.05" in second
    text = write_report(study).read_text()
    assert text.index(first) < text.index("<svg") < text.index("<article")


def test_a_page_says_what_each_difference_is_taken_to(study: Study) -> None:
    page = write_report(study).with_name("successor.html").read_text()
    assert "of “PSM v2, 4 views” to “HCL, 4 views”" in page
    assert "and “PSM v2, 4 views, half the epochs” and “HCL, 4 views, half the epochs” to “HCL”" in page
    assert "PSM v2, 4 views +2.00 ± 0.00 on HCL, 4 views" in page


def test_a_page_says_which_settings_its_rows_do_not_share(study: Study) -> None:
    write_report(study)
    training = {
        name: (study.report / f"{name}.html").read_text().partition("<dt>training</dt>")[2].partition("</dd>")[0]
        for name in ("schedules", "successor")
    }
    assert "epochs by row, batch 32" in training["schedules"]
    assert "epochs by row" in training["successor"]
    assert "temperature 0.5" in training["schedules"]


def test_nothing_is_answered_without_runs_of_psm(tmp_path: Path) -> None:
    study = Study(tmp_path / "study")
    found = plan("table1", preset="smoke", methods=["simclr"])
    add_entries(study, found.entries)
    for run in found.runs:
        write_record(study.record(run.name, run.evaluation_hash), record_of(run, 50.0, 40.0))
    collect_records(study)
    assert answer(load_results(study)) == []
