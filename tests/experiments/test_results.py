"""Results of experiments: aggregation, CSV files and pages."""

import csv
import json
import math
from pathlib import Path
from typing import Any

import pytest

from psm.experiments.aggregate import SeedStats, format_stats, headline, load_results, rank_correlation
from psm.experiments.catalog import EXPERIMENTS, Configuration, Experiment
from psm.experiments.plan import make_plan, read_request, resolved
from psm.experiments.report import write_report
from psm.experiments.results import (
    Study,
    add_entries,
    collect_records,
    is_finished,
    read_csv,
    write_csv,
    write_record,
)
from psm.utils.errors import UserError


def plan(*names: Any, **keys: Any) -> Any:
    return make_plan(read_request(names or ("all",), {"preset": "laptop"}, keys))


RUN_FIELDS = ("evaluation_hash", "title", "method", "data", "seed")


def record_of(run: Any, linear: Any, knn: Any, **more: Any) -> Any:
    """A record as a worker writes it, with scores of our choosing."""
    scores = [{"of": run.method, "score": "linear", "top1": linear, "top5": linear + 30}]
    scores += [{"of": run.method, "score": "knn", "top1": knn, "top5": knn + 30}]
    sizes = {"epochs": 1, "batch_size": 32, "encoder": "tiny", "images": 128, "test_images": 2000, "classes": 10}
    machine = {"psm": "0", "torch": "2", "threads": 1, "hardware": "a machine", "commit": "abc", "seconds": 60.0}
    about = {"run": run.name} | {name: getattr(run, name) for name in RUN_FIELDS}
    kept = {"evaluation": dict(run.evaluation), "config": resolved(run.settings), "curves": [], "date": "2024-01-01"}
    return about | sizes | machine | kept | {"scores": scores} | more


@pytest.fixture
def study(tmp_path: Path) -> Any:
    """Table 2 with three seeds; one run failed and one is missing."""
    found = plan("table2", preset="smoke", seeds=[0, 1, 2])
    study = Study(tmp_path / "study")
    add_entries(study, found.entries)
    values = {
        "psm": (50.0, 51.0, 53.0),
        "psm loss.hard_weight=0.0 loss.weight_sum=3.0": (49.0, 50.5, 51.0),
        "psm loss.soft_weight=0.0 loss.weight_sum=3.0": (48.0, 47.0),
    }
    for run in found.runs:
        if run.title in values and run.seed < len(values[run.title]):
            linear = values[run.title][run.seed]
            write_record(study.record(run.name, run.evaluation_hash), record_of(run, linear, linear - 5))
    return study, found


def test_results_equal_a_hand_computation(study: Any) -> None:
    study, _ = study
    collect_records(study)
    (result,) = load_results(study)
    (table,) = result.tables
    psm_row, without = table.row("PSM"), table.row("without L_hard")
    assert psm_row.score("linear").mean == pytest.approx((50 + 51 + 53) / 3)
    assert psm_row.score("linear").std == pytest.approx(math.sqrt((16 / 9 + 1 / 9 + 25 / 9) / 2))
    assert psm_row.score("knn", "top5").mean == pytest.approx((50 + 51 + 53) / 3 + 25)
    assert without.difference("linear").values == pytest.approx({0: -1.0, 1: -0.5, 2: -2.0})
    assert without.difference("linear").mean == pytest.approx(-3.5 / 3)
    assert table.row("without L_soft").difference("linear").values == pytest.approx({0: -2.0, 1: -4.0})
    assert table.row("without L_soft").paper_differences is None  # shapes are not the paper's data
    assert table.runs == 8
    assert table.planned == 12
    assert table.missing == ["without L_soft, seed 2", *(f"PPSM (without PNSM), seed {seed}" for seed in range(3))]
    # t with two degrees of freedom: 4.303 times the standard deviation over the root of three.
    assert without.difference("linear").half_width == pytest.approx(4.302653 * 0.763763 / math.sqrt(3), abs=1e-4)
    assert "with 95 % intervals: without L_hard −1.17 ± 1.90" in headline(result)[0]


def test_the_page_has_these_numbers_and_says_what_is_missing(study: Any) -> None:
    study, _ = study
    collect_records(study)
    page = write_report(study).parent / "table2.html"
    text = page.read_text()
    for words in ("51.33", "± 3.79", "−1.17", "± 1.90", "4 of 12 runs are missing", "without L_soft, seed 2"):
        assert words in text
    assert "psm experiment run table2 preset=smoke seeds=[0,1,2]" in text
    with (page.parent / "table2.csv").open() as file:
        rows = {(row["title"], row["score"]): row for row in csv.DictReader(file)}
    assert float(rows["without L_hard", "linear"]["top1_difference"]) == pytest.approx(-3.5 / 3)
    assert rows["PSM", "knn"]["seeds"] == "3"
    assert float(rows["PSM", "linear"]["top1_low"]) == pytest.approx(51.3333 - 3.7946, abs=1e-3)
    assert float(rows["PSM", "linear"]["top1_high"]) == pytest.approx(51.3333 + 3.7946, abs=1e-3)
    assert float(rows["PSM", "linear"]["top1_std"]) == pytest.approx(1.5275, abs=1e-3)
    assert "| without L_hard |" in (page.parent / "table2.md").read_text()
    for kind in ("svg", "png"):
        assert (page.parent / f"table2-shapes.{kind}").stat().st_size > 1000
    for name in page.parent.glob("*.html"):
        rest = name.read_text().replace("http://www.w3.org", "").replace("http://purl.org", "")
        rest = rest.replace("http://creativecommons.org", "").replace("https://matplotlib.org", "")
        assert "http" not in rest  # nothing is fetched


def test_a_difference_has_a_color_only_where_its_interval_leaves_out_zero(study: Any) -> None:
    study, found = study
    close = {0: 49.9, 1: 50.8, 2: 52.7}  # always lower, by much the same: −0.2 ± 0.25
    clear = {0: 48.0, 1: 49.0, 2: 51.1}  # −1.97 ± 0.14
    for run in found.runs:
        rows = {"psm loss.hard_weight=0.0": close, "psm loss.soft_weight=0.0": clear}
        chosen = next((values for title, values in rows.items() if run.title.startswith(title)), None)
        if chosen:
            value = chosen[run.seed]
            write_record(study.record(run.name, run.evaluation_hash), record_of(run, value, value - 5))
    collect_records(study)
    (table,) = load_results(study)[0].tables
    assert not table.row("without L_hard").difference("linear").is_clear
    assert table.row("without L_soft").difference("linear").is_clear
    text = (write_report(study).parent / "table2.html").read_text()
    assert text.count('<span class="down">') == 2  # by the linear layer and by nearest neighbors
    assert '<span class="up">' not in text


def test_several_k_are_all_in_the_results_and_the_first_in_the_table(study: Any) -> None:
    study, found = study
    run = next(run for run in found.runs if run.title == "psm" and run.seed == 0)
    record = record_of(run, 50.0, 45.0)
    first, second = (dict(record["scores"][1], top1=value) for value in (44.0, 47.0))
    first |= {"protocol": {"k": 5, "temperature": 0.1}, "top1_interval": [42.0, 46.0]}
    second |= {"protocol": {"k": 200, "temperature": 0.07}}
    grid = {"lr": 0.01, "lr_grid": [0.1, 0.01], "held_out_top1": [40.0, 41.0]}
    record["scores"] = [record["scores"][0] | {"protocol": grid}, first, second]
    write_record(study.record(run.name, run.evaluation_hash), record)
    collect_records(study)
    rows = [row for row in read_csv(study.csv("results")) if row["run"] == run.name]
    assert [(row["knn.k"], row["knn.temperature"], row["top1"]) for row in rows[1:]] == [
        ("5", "0.1", "44.0"),
        ("200", "0.07", "47.0"),
    ]
    assert (rows[1]["top1_low"], rows[1]["top1_high"], rows[2]["top1_low"]) == ("42.0", "46.0", "")
    assert (rows[0]["linear.lr"], rows[0]["linear.held_out_top1"]) == ("0.01", "[40.0, 41.0]")
    (table,) = load_results(study)[0].tables
    assert table.row("PSM").score("knn").values[0] == 44.0


def test_pages_need_the_results_files_alone(study: Any, tmp_path: Path) -> None:
    study, _ = study
    collect_records(study)
    first = write_report(study).parent / "table2.html"
    other = Study(tmp_path / "elsewhere")
    other.folder.mkdir()
    for path in study.folder.glob("*.csv"):
        (other.folder / path.name).write_bytes(path.read_bytes())
    second = write_report(other).parent / "table2.html"
    assert second.read_text() == first.read_text()


def test_results_survive_without_their_records(study: Any) -> None:
    study, found = study
    collect_records(study)
    before = read_csv(study.csv("results"))
    done = next(run for run in found.runs if run.title == "psm")
    study.record(done.name, done.evaluation_hash).unlink()
    collect_records(study)
    after = read_csv(study.csv("results"))
    assert sorted(map(str, before)) == sorted(map(str, after))
    write_record(study.record(done.name, done.evaluation_hash), record_of(done, 99.0, 98.0))
    collect_records(study)
    mine = [row for row in read_csv(study.csv("results")) if row["run"] == done.name]
    assert sorted(row["top1"] for row in mine) == ["98.0", "99.0"]


def test_damage_is_noticed(study: Any, caplog: pytest.LogCaptureFixture) -> None:
    """A damaged record counts as missing, a damaged row of a CSV file is refused by its line."""
    study, found = study
    collect_records(study)
    done = next(run for run in found.runs if run.title == "psm")
    record = study.record(done.name, done.evaluation_hash)
    record.write_text(record.read_text().replace('"top1": 45.0', '"top1": 95.0'))
    assert not is_finished(study, done)
    assert f"{record} is damaged and counts as missing" in caplog.text
    results = study.csv("results")
    whole = results.read_text()
    results.write_text(whole.replace("80.0", "88.0", 1))
    line = 1 + next(i for i, row in enumerate(whole.splitlines()) if "80.0" in row)
    for read in (collect_records, load_results):
        with pytest.raises(UserError, match=rf"results.csv is damaged: line {line} differs from its checksum"):
            read(study)


@pytest.mark.parametrize(("field", "value"), [("config", []), ("run", ["a"]), ("scores", [3]), ("evaluation", None)])
def test_a_record_of_another_form_counts_as_missing(study: Any, field: str, value: Any) -> None:
    """Edited by hand and without its checksum."""
    study, found = study
    done = next(run for run in found.runs if run.title == "psm")
    path = study.record(done.name, done.evaluation_hash)
    content = json.loads(path.read_text()) | {field: value}
    content.pop("crc32", None)
    path.write_text(json.dumps(content))
    assert not is_finished(study, done)
    collect_records(study)


@pytest.mark.parametrize(
    "row", ["figure1", "figure1,a\0b", "~nobody,~nobody", "x" * 3, "1,2,3,4,5,6,7,8,9,10,11,12,13"]
)
def test_a_plan_of_another_form_is_refused_or_read(study: Any, row: str) -> None:
    """Rows that are cut off, too long or hold zero bytes, without checksums; names that are no path."""
    study, _ = study
    collect_records(study)
    header = "experiment,data,protocol,title,seed,run,evaluation_hash,command"
    whole = f"figure1,~nobody,abcd,psm,0,{'r' * 300},h,psm experiment run"
    study.csv("plan").write_text(f"{header}\n{whole}\n{row}\n")
    with pytest.raises(UserError, match=r"plan\.csv is damaged: line 3"):
        load_results(study)
    study.csv("plan").write_text(f"{header}\n{whole}\n")
    assert all(headline(result) for result in load_results(study))


def test_files_without_checksums_are_read(study: Any) -> None:
    """Those of an earlier version, or written by hand; and nonsense in them is a sentence."""
    study, _ = study
    collect_records(study)
    before = load_results(study)
    for path in study.folder.glob("*.csv"):
        write_csv(path, read_csv(path), sealed=False)
        assert "crc32" not in path.read_text()
    assert load_results(study) == before
    plan_file = study.csv("plan")
    plan_file.write_text(plan_file.read_text().replace("evaluation_hash", "evaluation_hush", 1))
    with pytest.raises(UserError, match="do not hold what psm writes"):
        load_results(study)


def test_protocols_are_never_mixed(study: Any) -> None:
    study, _ = study
    other = plan("table2", preset="smoke", epochs=2, methods=["psm"])
    add_entries(study, other.entries)
    for run in other.runs:
        write_record(study.record(run.name, run.evaluation_hash), record_of(run, 70.0, 60.0, epochs=2))
    collect_records(study)
    (result,) = load_results(study)
    assert [table.row("PSM").score("linear").count for table in result.tables] == [3, 1]
    add_entries(study, plan("table2", preset="smoke", seeds=[0, 1, 2]).entries)  # a repeated command changes no order
    assert [table.row("PSM").score("linear").count for table in load_results(study)[0].tables] == [3, 1]
    text = (write_report(study).parent / "table2.html").read_text()
    assert "tiny, 1 epochs" in text
    assert "tiny, 2 epochs" in text


def test_results_have_every_setting(study: Any) -> None:
    study, _ = study
    collect_records(study)
    rows = read_csv(study.csv("results"))
    assert len(rows) == 16
    for key in ("positives.k", "optim.lr", "bank.size", "views.preset", "linear.epochs", "commit", "hardware"):
        assert key in rows[0]
    assert "images.root" not in rows[0]  # a path is no setting of a result


def test_an_experiment_of_ones_own_is_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = tuple(
        Configuration(f"t = {t}", {"method": "psm", "loss.temperature": t}, None if t == 0.5 else "t = 0.5", t)
        for t in (0.2, 0.5)
    )
    mine = Experiment("temperature", "How soft", "How does t matter?", "sweep", rows, ("cifar10",), axis="t")
    monkeypatch.setitem(EXPERIMENTS, "temperature", mine)
    found = plan("temperature", preset="smoke")
    assert [resolved(run.settings)["loss.temperature"] for run in found.runs] == [0.2, 0.5]
    study = Study(tmp_path)
    add_entries(study, found.entries)
    for run, score in zip(found.runs, (40.0, 41.5), strict=True):
        write_record(study.record(run.name, run.evaluation_hash), record_of(run, score, score))
    collect_records(study)
    text = (write_report(study).parent / "temperature.html").read_text()
    assert "steps the best is t = 0.5 with 41.50 % top-1; all lie within 1.50 points." in text
    assert "of the paper" not in text


def test_an_experiment_of_a_plugin_that_is_not_given_is_named(
    study: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    study, _ = study
    collect_records(study)
    monkeypatch.setattr("psm.experiments.aggregate.EXPERIMENTS", {})
    assert not load_results(study)
    assert "table2 is left out of the pages: give the plugin" in caplog.text


def test_rank_correlation() -> None:
    assert rank_correlation([(1, 10), (2, 20), (3, 30)]) == pytest.approx(1)
    assert rank_correlation([(1, 30), (2, 20), (3, 10)]) == pytest.approx(-1)
    assert rank_correlation([(1, 1), (2, 3), (3, 2), (4, 4)]) == pytest.approx(0.8)
    assert rank_correlation([(1, 1), (2, 2)]) is None
    assert rank_correlation([(1, 1), (1, 2), (1, 3)]) is None


def test_one_seed_has_no_deviation() -> None:
    assert SeedStats({0: 1.0}).std is None
    assert SeedStats().std is None
    assert format_stats(SeedStats()) == "–"
