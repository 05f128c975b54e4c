"""The paper's experiments as data: what is planned for them, what is measured, and what their results say."""

import csv
import math
import statistics

import pytest
import torch
from torch.nn.functional import normalize

import psm
from psm.config import merge as settings
from psm.config.schema import EvaluateConfig, ImagesConfig, PretrainConfig
from psm.data import ImageDataset, ImageStore, load_dataset
from psm.evaluation.gradient_ranks import by_rank, gradient_ranks, negative_gradients
from psm.experiments.aggregate import SeedStats, format_stats, headline, load_results, rank_correlation
from psm.experiments.catalog import EXPERIMENTS, Configuration, Experiment
from psm.experiments.plan import data_name, make_plan, read_request, resolved
from psm.experiments.presets import PRESETS
from psm.experiments.report import write_report
from psm.experiments.results import Study, add_entries, collect_records, has_gradients, read_csv, write_record
from psm.methods.build import composition_of
from psm.methods.registry import METHODS
from psm.mining.memory_bank import MemoryBank
from psm.mining.purity import purity, settled
from psm.utils.errors import UserError


def plan(*names, **keys):
    return make_plan(read_request(names or ("all",), {"preset": "laptop"}, keys))


@pytest.mark.parametrize("preset", PRESETS)
def test_every_configuration_of_every_preset_builds_and_composes(preset):
    for run in {run.title: run for run in plan(preset=preset).runs}.values():
        config = settings.build(PretrainConfig, run.settings)
        assert method_of(config).needs_bank or not config.monitor.purity
        settings.build(EvaluateConfig, run.evaluation)


def test_the_paper_preset_has_the_papers_settings():
    runs = plan(preset="paper").runs
    assert {run.data for run in runs} == {"cifar10", "cifar100", "tiny-imagenet"}
    for run in runs:
        full = resolved(run.settings)
        expected = {
            "encoder": "resnet18", "batch_size": 256, "epochs": 200, "bank.size": 16384, "loss.temperature": 0.5,
            "optim.lr": 0.1, "optim.warmup_lr": 1e-4, "optim.warmup": 0.1, "optim.momentum": 0.9,
            "heads.hidden_dim": 512, "heads.out_dim": 128, "target.momentum": 0.99, "optim.weight_decay": None,
            "images.limit": None,
        }  # fmt: skip
        assert {key: full[key] for key in expected} == expected
        assert run.evaluation["linear.epochs"] == 100
    psm_run = next(run for run in runs if run.title == "psm")
    full = resolved(psm_run.settings)
    assert (full["positives.k"], full["negatives.a"], full["loss.hard"], full["loss.soft"]) == (5, 0.5, 1.0, 1.0)


def test_the_catalog_is_the_papers():
    tables = {name: [row.title for row in EXPERIMENTS[name].configurations] for name in EXPERIMENTS}
    assert {row.settings["method"] for row in EXPERIMENTS["table1"].configurations} == set(METHODS)
    assert len(tables["table2"]) == 4
    assert len(tables["table3"]) == 6
    assert tables["figure5"] == ["V0", "V1", "V2", "V3", "V4"]
    assert [row.value for row in EXPERIMENTS["figure6"].configurations] == [1, 5, 10, 20]
    for experiment in EXPERIMENTS.values():
        titles = [row.title for row in experiment.configurations]
        assert all(row.reference in (None, *titles) for row in experiment.configurations)
        for printed in experiment.paper.values():
            assert list(printed) == titles
    paper = EXPERIMENTS["table1"].paper
    assert [paper[data]["PSM"][0] for data in paper] == [88.57, 61.10, 36.69]  # of the abstract
    assert all(max(rows, key=lambda row: rows[row][0]) == "PSM" for rows in paper.values())


def test_runs_are_shared_and_every_entry_has_its_run():
    whole = plan()
    assert len({run.name for run in whole.runs}) == len(whole.runs)
    alone = [len(plan(name).runs) for name in EXPERIMENTS]
    assert len(whole.runs) < sum(alone)
    runs = {(entry.experiment, entry.title, entry.seed): entry.run for entry in whole.entries}
    psm_run = runs["table1", "PSM", 0]
    for name, title in (
        ("table2", "PSM"), ("figure1", "PSM"), ("figure5", "V0"), ("figure6", "k = 5"), ("figure7", "a = 0.5"),
        ("figure8", "λ = 1"),
    ):  # fmt: skip
        assert runs[name, title, 0] == psm_run
    assert runs["figure8", "λ = 0", 0] == runs["table2", "without L_hard", 0]
    assert runs["table3", "MoCo v2", 1] == runs["figure2", "MoCo v2", 1] == runs["table1", "MoCo v2", 1]
    assert runs["figure6", "k = 5", 2] == runs["table1", "PSM", 2]  # the yardstick has all seeds
    assert ("figure6", "k = 10", 1) not in runs
    known = {run.name for run in whole.runs} | {
        f"{run.baselines}/{of}" for run in whole.runs for of in ("raw pixels", "untrained encoder")
    }
    assert {entry.run for entry in whole.entries} <= known


def test_a_run_is_known_by_every_setting_that_matters():
    def name(**keys):
        (run,) = plan("figure2", preset="smoke", **keys).runs
        return run.name

    plain = name()
    different = [
        ("epochs", 2), ("batch_size", 16), ("encoder", "resnet18"), ("optim.lr", 0.2), ("bank.size", 32),
        ("data", ["cifar10"]),
        ("images.limit", 96), ("views.blur", 0.5), ("loss.temperature", 0.2), ("heads.out_dim", 8), ("seeds", [1]),
        ("precision", "bf16-mixed"), ("channels_last", False), ("negatives.a", 0.7), ("images.split", "official"),
        ("trainer.deterministic", True), ("target.momentum", 0.9), ("optim.clip", 1.0), ("stem", "imagenet"),
    ]  # fmt: skip
    names = [name(**{key: value}) for key, value in different]
    assert len({plain, *names}) == len(different) + 1
    for key, value in (
        ("images.root", "elsewhere"), ("progress", False), ("jobs", 2), ("accelerator", "cpu"), ("out", "other"),
        ("linear.epochs", 3),
    ):  # fmt: skip
        assert name(**{key: value}) == plain
    (scored,) = plan("figure2", preset="smoke", **{"linear.epochs": 3}).runs
    (before,) = plan("figure2", preset="smoke").runs
    assert scored.evaluation_hash != before.evaluation_hash


def test_rows_win_over_keys_and_methods_filter_rows():
    ks = {resolved(run.settings)["positives.k"] for run in plan("figure6", **{"positives.k": 3}).runs}
    assert ks == {1, 3, 10, 20}  # the row of the paper's choice says nothing of k, so that a key reaches it
    titles = {entry.title for entry in plan("table1", methods=["psm", "byol"]).entries}
    assert titles == {"PSM", "BYOL", "Raw pixels", "Untrained encoder"}


def test_a_folder_is_named_without_where_it_lies(tmp_path):
    (tmp_path / "birds").mkdir()
    found = plan("table1", data=str(tmp_path / "birds"), methods="psm", seeds=0)
    assert {entry.data for entry in found.entries} == {"birds"}
    assert str(tmp_path) not in "".join(entry.command + entry.run for entry in found.entries)
    assert found.runs[0].settings["data"] == str(tmp_path / "birds")
    assert data_name("cifar10") == "cifar10"


# Purity


def slow_purity(bank, keys, ids, labels, own):
    shares = {"purity_top1": [], "purity_top5": [], "hit_top5": []}
    for key, image in zip(keys, ids.tolist(), strict=True):
        rows = [
            (torch.dot(normalize(key, dim=0), bank.rows[place]).item(), int(bank.ids[place]))
            for place in range(int(bank.fill))
            if own or int(bank.ids[place]) != image
        ]
        if len(rows) < 5:
            continue
        best = [labels[other] == labels[image] for _, other in sorted(rows, reverse=True)[:5]]
        shares["purity_top1"].append(float(best[0]))
        shares["purity_top5"].append(statistics.fmean(map(float, best)))
        shares["hit_top5"].append(float(any(best)))
    return {name: statistics.fmean(values) for name, values in shares.items() if values}


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("pushed", [3, 5, 20, 40])
def test_purity_against_loops(pushed, own):
    draws = torch.Generator().manual_seed(pushed)
    labels = torch.randint(0, 3, (30,), generator=draws)
    bank = MemoryBank(30, 4)
    bank.enqueue(torch.randn(pushed, 4, generator=draws), torch.randint(0, 30, (pushed,), generator=draws))
    keys, ids = torch.randn(12, 4, generator=draws), torch.arange(12)
    found = settled({name: value.item() for name, value in purity(bank, keys, ids, labels, own).items()})
    expected = slow_purity(bank, keys, ids, labels, own)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, abs=1e-6)


def test_purity_over_steps_counts_queries_that_were_served():
    means = {"loss": 2.0, "purity_top1": 0.25, "purity_top5": 0.2, "hit_top5": 0.3, "purity_served": 0.5}
    assert settled(means) == {"loss": 2.0, "purity_top1": 0.5, "purity_top5": 0.4, "hit_top5": 0.6}
    assert settled(means | {"purity_served": 0.0}) == {"loss": 2.0}
    assert settled({"loss": 2.0}) == {"loss": 2.0}


@pytest.fixture(scope="module")
def moco(tmp_path_factory):
    from helpers import SMALL

    out = tmp_path_factory.mktemp("runs") / "moco"
    return psm.pretrain(out, method="mocov2", **SMALL | {"monitor": {"purity": True, "every": 2}})


def test_purity_is_recorded_and_changes_nothing(tmp_path, small, moco):
    for record in moco.metrics:
        assert 0 <= record["purity_top5"] <= record["hit_top5"] <= 1
        assert 0 <= record["purity_top1"] <= 1
        assert "purity_served" not in record
    blind = psm.pretrain(tmp_path / "a", method="mocov2", **small)
    assert [record["loss"] for record in blind.metrics] == [record["loss"] for record in moco.metrics]
    assert "purity_top1" not in blind.metrics[0]


def test_purity_is_refused_without_a_bank_or_labels(tmp_path, small):
    small["monitor"]["purity"] = True
    with pytest.raises(UserError, match="method=simclr as set has none"):
        psm.pretrain(tmp_path / "a", method="simclr", **small)
    images = ImageStore(torch.zeros(40, 3, 16, 16, dtype=torch.uint8))
    with pytest.raises(UserError, match="has none: leave it at false"):
        psm.pretrain(tmp_path / "a", **small | {"data": ImageDataset("blind", images, None, ())})
    with pytest.raises(UserError, match=r"bank\.size=5 or more"):
        psm.pretrain(tmp_path / "a", **small | {"bank": {"size": 4}})
    assert not (tmp_path / "a").exists()


# Gradients


def test_gradients_against_autograd():
    """Of InfoNCE and of eq. 2, with respect to a query that autograd normalizes itself."""
    draws = torch.Generator().manual_seed(1)
    bank = MemoryBank(9, 5).double()
    bank.enqueue(torch.randn(7, 5, generator=draws, dtype=torch.double), torch.arange(7))
    query, key = (normalize(torch.randn(3, 5, generator=draws, dtype=torch.double), dim=1) for _ in range(2))
    temperature, ranks = 0.5, 6
    found = negative_gradients(query, key, bank, temperature, ranks)
    for row in range(3):
        raw = query[row].clone().requires_grad_()
        unit = normalize(raw, dim=0)
        negatives = bank.rows[:7]
        order = (negatives @ query[row]).argsort(descending=True)
        similarity = negatives @ unit
        positive = unit @ key[row]
        loss = torch.logsumexp(torch.cat([positive[None], similarity]) / temperature, 0) - positive / temperature
        pulls = torch.autograd.grad(loss, similarity, retain_graph=True)[0]  # the softmax over all candidates, over t
        total = torch.autograd.grad(loss, raw, retain_graph=True)[0]
        parts = [torch.autograd.grad(positive, raw, retain_graph=True)[0] * (pulls.sum() * -1)]
        for rank, place in enumerate(order[:ranks]):
            turn = torch.autograd.grad(similarity[place], raw, retain_graph=True)[0]
            parts.append(pulls[place] * turn)
            assert found.softmax[row, rank].item() == pytest.approx(pulls[place].item(), rel=1e-9)
            assert found.grad_norm[row, rank].item() == pytest.approx(turn.norm().item(), rel=1e-9)
            # eq. 2: the probability is what a sigmoid gave, so the loss of a negative changes with its logit by s.
            s = similarity[place].detach().clamp(min=0)
            logit = torch.logit(s.clamp(1e-12, 1 - 1e-12)).requires_grad_()
            slope = torch.autograd.grad(-torch.log1p(-torch.sigmoid(logit)), logit)[0]
            assert found.binary[row, rank].item() == pytest.approx(slope.item(), abs=1e-9)
            assert found.ids[row, rank] == bank.ids[place]
        last = order[ranks]
        turn = torch.autograd.grad(similarity[last], raw, retain_graph=True)[0]
        assert torch.allclose(sum(parts) + pulls[last] * turn, total, atol=1e-9)
        assert found.positive_rank[row] == 1 + (negatives @ query[row] > query[row] @ key[row]).sum()


def test_gradients_by_rank_against_loops():
    draws = torch.Generator().manual_seed(2)
    bank = MemoryBank(12, 4)
    bank.enqueue(torch.randn(12, 4, generator=draws), torch.arange(12) % 6)
    query, key = (normalize(torch.randn(5, 4, generator=draws), dim=1) for _ in range(2))
    labels, ids = torch.tensor([0, 1, 0, 1, 0, 1]), torch.arange(5)
    found = negative_gradients(query, key, bank, 0.5, 8, exclude_ids=ids)
    for rank in by_rank(found, ids, labels):
        slopes = [row[rank.rank - 1].item() for row in found.softmax]
        assert rank.softmax_slope_mean == pytest.approx(statistics.fmean(slopes), rel=1e-5)
        assert rank.softmax_slope_variance == pytest.approx(statistics.pvariance(slopes), rel=1e-4, abs=1e-12)
        pairs = zip(found.binary, found.grad_norm, strict=True)
        lengths = [(slope[rank.rank - 1] * turn[rank.rank - 1]).item() for slope, turn in pairs]
        assert rank.binary_length_mean == pytest.approx(statistics.fmean(lengths), rel=1e-5)
        assert rank.binary_length_variance == pytest.approx(statistics.pvariance(lengths), rel=1e-4, abs=1e-12)
        images = [row[rank.rank - 1].item() for row in found.ids]
        same = [labels[image] == labels[query] for query, image in enumerate(images)]
        assert rank.same_class == pytest.approx(sum(map(int, same)) / 5)
        assert rank.own_image == 0  # a query may not meet its own image here


def test_gradients_of_a_run(moco):
    data = load_dataset("shapes", ImagesConfig(limit=100, size=16), progress=False)
    ranks = gradient_ranks(moco.out / "checkpoints" / "last.ckpt", data, queries=20, ranks=200)
    assert [rank["rank"] for rank in ranks] == list(range(1, 51))  # the bank holds no more
    similarity = [rank["similarity"] for rank in ranks]
    assert similarity == sorted(similarity, reverse=True)
    assert all(math.isfinite(value) for rank in ranks for value in rank.values())
    assert ranks[0]["queries"] == 20
    assert has_gradients({"gradients": ranks})
    assert not has_gradients({"gradients": [{"rank": 1}]})  # of an earlier version: measured again
    again = gradient_ranks(moco.out / "checkpoints" / "last.ckpt", data, queries=20, ranks=200)
    assert again == ranks


def test_gradients_need_a_bank(tmp_path, small):
    run = psm.pretrain(tmp_path / "a", method="simclr", **small | {"epochs": 1})
    with pytest.raises(UserError, match="has no memory bank"):
        gradient_ranks(run.out / "checkpoints" / "last.ckpt", run.data)


# Results


RUN_FIELDS = ("evaluation_hash", "title", "method", "data", "seed")


def record_of(run, linear, knn, **more):
    """A record as a worker writes it, with scores of our choosing."""
    scores = [{"of": run.method, "score": "linear", "top1": linear, "top5": linear + 30}]
    scores += [{"of": run.method, "score": "knn", "top1": knn, "top5": knn + 30}]
    sizes = {"epochs": 1, "batch_size": 32, "encoder": "tiny", "images": 128, "test_images": 2000, "classes": 10}
    machine = {"psm": "0", "torch": "2", "threads": 1, "hardware": "a machine", "commit": "abc", "seconds": 60.0}
    about = {"run": run.name} | {name: getattr(run, name) for name in RUN_FIELDS}
    kept = {"evaluation": dict(run.evaluation), "config": resolved(run.settings), "curves": [], "date": "2024-01-01"}
    return about | sizes | machine | kept | {"scores": scores} | more


@pytest.fixture
def study(tmp_path):
    """Table 2 with three seeds; one run failed and one is missing."""
    found = plan("table2", preset="smoke", seeds=[0, 1, 2])
    study = Study(tmp_path / "study")
    add_entries(study, found.entries)
    values = {"psm": (50.0, 51.0, 53.0), "psm loss.hard=0.0": (49.0, 50.5, 51.0), "psm loss.soft=0.0": (48.0, 47.0)}
    for run in found.runs:
        if run.title in values and run.seed < len(values[run.title]):
            linear = values[run.title][run.seed]
            write_record(study.record(run.name, run.evaluation_hash), record_of(run, linear, linear - 5))
    return study, found


def test_results_equal_a_hand_computation(study):
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
    assert "without L_hard −1.17 ± 0.76" in headline(result)[0]


def test_the_page_has_these_numbers_and_says_what_is_missing(study):
    study, _ = study
    collect_records(study)
    page = write_report(study).parent / "table2.html"
    text = page.read_text()
    for words in ("51.33", "± 1.53", "−1.17", "± 0.76", "4 of 12 runs are missing", "without L_soft, seed 2"):
        assert words in text
    assert "psm experiment run table2 preset=smoke seeds=[0,1,2]" in text
    with (page.parent / "table2.csv").open() as file:
        rows = {(row["title"], row["score"]): row for row in csv.DictReader(file)}
    assert float(rows["without L_hard", "linear"]["top1_difference"]) == pytest.approx(-3.5 / 3)
    assert rows["PSM", "knn"]["seeds"] == "3"
    assert "| without L_hard |" in (page.parent / "table2.md").read_text()
    for kind in ("svg", "png"):
        assert (page.parent / f"table2-shapes.{kind}").stat().st_size > 1000
    for name in page.parent.glob("*.html"):
        rest = name.read_text().replace("http://www.w3.org", "").replace("http://purl.org", "")
        rest = rest.replace("http://creativecommons.org", "").replace("https://matplotlib.org", "")
        assert "http" not in rest  # nothing is fetched


def test_pages_need_the_results_files_alone(study, tmp_path):
    study, _ = study
    collect_records(study)
    first = write_report(study).parent / "table2.html"
    other = Study(tmp_path / "elsewhere")
    other.folder.mkdir()
    for path in study.folder.glob("*.csv"):
        (other.folder / path.name).write_bytes(path.read_bytes())
    second = write_report(other).parent / "table2.html"
    assert second.read_text() == first.read_text()


def test_results_survive_without_their_records(study):
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


def test_protocols_are_never_mixed(study):
    study, _ = study
    other = plan("table2", preset="smoke", epochs=2, methods=["psm"])
    add_entries(study, other.entries)
    for run in other.runs:
        write_record(study.record(run.name, run.evaluation_hash), record_of(run, 70.0, 60.0, epochs=2))
    collect_records(study)
    (result,) = load_results(study)
    assert [table.row("PSM").score("linear").count for table in result.tables] == [3, 1]
    text = (write_report(study).parent / "table2.html").read_text()
    assert "tiny, 1 epochs" in text
    assert "tiny, 2 epochs" in text


def test_results_have_every_setting(study):
    study, _ = study
    collect_records(study)
    rows = read_csv(study.csv("results"))
    assert len(rows) == 16
    for key in ("positives.k", "optim.lr", "bank.size", "views.preset", "linear.epochs", "commit", "hardware"):
        assert key in rows[0]
    assert "images.root" not in rows[0]  # where images lie is no setting of a result


def test_an_experiment_of_ones_own_is_a_row(tmp_path, monkeypatch):
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
    assert "Best is t = 0.5 with 41.50 % top-1; all lie within 1.50 points." in text
    assert "of the paper" not in text


def test_rank_correlation():
    assert rank_correlation([(1, 10), (2, 20), (3, 30)]) == pytest.approx(1)
    assert rank_correlation([(1, 30), (2, 20), (3, 10)]) == pytest.approx(-1)
    assert rank_correlation([(1, 1), (2, 3), (3, 2), (4, 4)]) == pytest.approx(0.8)
    assert rank_correlation([(1, 1), (2, 2)]) is None
    assert rank_correlation([(1, 1), (1, 2), (1, 3)]) is None


def test_one_seed_has_no_deviation():
    assert SeedStats({0: 1.0}).std is None
    assert SeedStats().std is None
    assert format_stats(SeedStats()) == "–"
