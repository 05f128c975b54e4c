"""What a study's results say: means and spreads over seeds, differences, and beside them what the paper printed.

Reads the results files alone. Imports nothing heavy.
"""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from psm.experiments.catalog import EXPERIMENTS, Configuration, Experiment
from psm.experiments.plan import BASELINES, data_title
from psm.experiments.results import GRADIENTS, Study, read_table

PURITY = ("purity_top1", "purity_top5", "hit_top5")


@dataclass(frozen=True)
class Cell:
    """One number measured with several seeds."""

    values: Mapping[int, float] = field(default_factory=dict)  # by seed

    @property
    def count(self) -> int:
        return len(self.values)

    @property
    def mean(self) -> float | None:
        return statistics.fmean(self.values.values()) if self.values else None

    @property
    def deviation(self) -> float | None:
        """Standard deviation over seeds, of the sample (n - 1); None for fewer than two."""
        return statistics.stdev(self.values.values()) if self.count > 1 else None

    def minus(self, other: "Cell") -> "Cell":
        """The differences, seed by seed: equal seeds start from equal weights and see equal images."""
        return Cell({seed: value - other.values[seed] for seed, value in self.values.items() if seed in other.values})


@dataclass(frozen=True)
class Line:
    """One row of a table or point of a figure."""

    title: str
    against: str | None
    value: float | None
    baseline: bool  # raw pixels or an untrained encoder
    stressed: bool
    scores: Mapping[tuple[str, str], Cell]  # (linear, top1) ...
    differences: Mapping[tuple[str, str], Cell]
    paper: tuple[float, float] | None
    paper_differences: tuple[float, float] | None
    planned: int
    curves: Mapping[str, Mapping[int, Cell]]  # purity -> epoch -> over seeds
    ranks: Sequence[Mapping[str, Cell]]  # figure 2: rank -> what -> over seeds

    def cell(self, score: str, top: str = "top1") -> Cell:
        return self.scores.get((score, top), Cell())

    def difference(self, score: str, top: str = "top1") -> Cell:
        return self.differences.get((score, top), Cell())


@dataclass(frozen=True)
class Group:
    """The rows on one data set under one protocol: what may be compared."""

    data: str
    protocol: str
    lines: Sequence[Line]
    facts: Mapping[str, str]  # of any of its results
    seconds: float
    runs: int
    planned: int
    missing: Sequence[str]
    failed: Sequence[Mapping[str, str]]
    hardware: Sequence[str]
    commits: Sequence[str]
    versions: Sequence[str]
    dates: tuple[str, str] | None
    commands: Sequence[str]

    @property
    def title(self) -> str:
        return data_title(self.data)

    @property
    def score(self) -> str:
        """The score that rows are compared by: the paper's linear protocol, unless that was switched off."""
        return "linear" if any(line.cell("linear").count for line in self.lines) else "knn"

    @property
    def rows(self) -> list[Line]:
        return [line for line in self.lines if not line.baseline]

    def line(self, title: str | None) -> Line | None:
        return next((line for line in self.lines if line.title == title), None)


@dataclass(frozen=True)
class Answer:
    """An experiment with what was measured for it."""

    experiment: Experiment
    groups: Sequence[Group]

    @property
    def name(self) -> str:
        return self.experiment.name


def read_answers(study: Study) -> list[Answer]:
    """Every experiment that was planned in this study, in the catalog's order."""
    tables = {name: read_table(study.table(name)) for name in ("plan", "results", "curves", "gradients", "failures")}
    scores: dict[tuple[str, str], list[Mapping[str, str]]] = _by_run(tables["results"])
    curves, gradients = _by_run(tables["curves"]), _by_run(tables["gradients"])
    failures = {row["run"]: row for row in tables["failures"]}
    planned: dict[str, dict[tuple[str, str], list[Mapping[str, str]]]] = {}
    for place in tables["plan"]:
        planned.setdefault(place["experiment"], {}).setdefault((place["data"], place["protocol"]), []).append(place)
    return [
        Answer(
            experiment,
            [
                _group(experiment, data, protocol, places, scores, curves, gradients, failures)
                for (data, protocol), places in planned[name].items()
            ],
        )
        for name, experiment in EXPERIMENTS.items()
        if name in planned
    ]


def _by_run(rows: Iterable[Mapping[str, str]]) -> dict[tuple[str, str], list[Mapping[str, str]]]:
    found: dict[tuple[str, str], list[Mapping[str, str]]] = {}
    for row in rows:
        found.setdefault((row["run"], row["evaluated"]), []).append(row)
    return found


def _group(
    experiment: Experiment,
    data: str,
    protocol: str,
    places: Sequence[Mapping[str, str]],
    scores: Mapping[tuple[str, str], list[Mapping[str, str]]],
    curves: Mapping[tuple[str, str], list[Mapping[str, str]]],
    gradients: Mapping[tuple[str, str], list[Mapping[str, str]]],
    failures: Mapping[str, Mapping[str, str]],
) -> Group:
    def rows_of(table: Mapping, title: str) -> dict[int, list[Mapping[str, str]]]:
        mine = [place for place in places if place["title"] == title]
        return {int(p["seed"]): table[p["run"], p["evaluated"]] for p in mine if (p["run"], p["evaluated"]) in table}

    known = {row.title: row for row in experiment.configurations}
    titles = [title for title in (*BASELINES.values(), *known) if any(place["title"] == title for place in places)]
    cells = {title: _scores(rows_of(scores, title)) for title in titles}
    lines = [
        _line(
            title,
            known.get(title),
            cells,
            experiment.paper.get(data, {}),
            sum(place["title"] == title for place in places),
            _curves(rows_of(curves, title)),
            _ranks(rows_of(gradients, title)),
        )
        for title in titles
    ]
    of_rows = [place for place in places if place["title"] in known]
    done = [place for place in of_rows if (place["run"], place["evaluated"]) in scores]
    results = [scores[place["run"], place["evaluated"]][0] for place in done]
    dates = sorted(row["date"] for row in results)
    return Group(
        data=data,
        protocol=protocol,
        lines=lines,
        facts=results[-1] if results else {},
        seconds=sum(float(row["seconds"] or 0) for row in results),
        runs=len(done),
        planned=len(of_rows),
        missing=[
            f"{place['title']}, seed {place['seed']}"
            for place in of_rows
            if place not in done and place["run"] not in failures
        ],
        failed=[
            dict(failures[place["run"]]) | {"title": place["title"]}
            for place in of_rows
            if place not in done and place["run"] in failures
        ],
        hardware=_distinct(row["hardware"] for row in results),
        commits=_distinct(row["commit"] for row in results),
        versions=_distinct(f"psm {row['psm']}, torch {row['torch']}, threads: {row['threads']}" for row in results),
        dates=(dates[0], dates[-1]) if dates else None,
        commands=_distinct(place["command"] for place in places if place.get("command")),
    )


def _distinct(values: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(values))


def _scores(by_seed: Mapping[int, Sequence[Mapping[str, str]]]) -> dict[tuple[str, str], Cell]:
    found: dict[tuple[str, str], dict[int, float]] = {}
    for seed, rows in by_seed.items():
        for row in rows:
            for top in ("top1", "top5"):
                found.setdefault((row["score"], top), {})[seed] = float(row[top])
    return {key: Cell(values) for key, values in found.items()}


def _line(
    title: str,
    row: Configuration | None,
    cells: Mapping[str, Mapping[tuple[str, str], Cell]],
    printed: Mapping[str, tuple[float, float]],
    planned: int,
    curves: Mapping[str, Mapping[int, Cell]],
    ranks: Sequence[Mapping[str, Cell]],
) -> Line:
    against = row.against if row else None
    other = cells.get(against, {}) if against else {}
    paper, reference = printed.get(title), printed.get(against or "")
    return Line(
        title=title,
        against=against,
        value=row.value if row else None,
        baseline=row is None,
        stressed=bool(row and row.stressed),
        scores=cells[title],
        differences={key: cell.minus(other[key]) for key, cell in cells[title].items() if key in other},
        paper=paper,
        paper_differences=(paper[0] - reference[0], paper[1] - reference[1]) if paper and reference else None,
        planned=planned,
        curves=curves,
        ranks=ranks,
    )


def _curves(by_seed: Mapping[int, Sequence[Mapping[str, str]]]) -> dict[str, dict[int, Cell]]:
    found: dict[str, dict[int, dict[int, float]]] = {}
    for seed, rows in by_seed.items():
        for row in rows:
            for name in PURITY:
                if row.get(name):
                    found.setdefault(name, {}).setdefault(int(row["epoch"]), {})[seed] = 100 * float(row[name])
    return {name: {epoch: Cell(v) for epoch, v in sorted(epochs.items())} for name, epochs in found.items()}


def _ranks(by_seed: Mapping[int, Sequence[Mapping[str, str]]]) -> list[dict[str, Cell]]:
    found: dict[int, dict[str, dict[int, float]]] = {}
    needed = [name for name in GRADIENTS if name != "same_class"]  # which takes labels
    for seed, rows in by_seed.items():
        for row in (row for row in rows if all(row.get(name) for name in needed)):
            for name in GRADIENTS:
                if row.get(name):
                    found.setdefault(int(row["rank"]), {}).setdefault(name, {})[seed] = float(row[name])
    return [{name: Cell(v) for name, v in found[rank].items()} for rank in sorted(found)]


def rank_correlation(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Spearman's, with ties sharing their ranks; None for fewer than three pairs or without any order."""
    if len(pairs) < 3:
        return None

    def ranks(values: Sequence[float]) -> list[float]:
        return [
            sum(other < value for other in values) + (sum(other == value for other in values) + 1) / 2
            for value in values
        ]

    first, second = (ranks(side) for side in zip(*pairs, strict=True))
    try:
        return statistics.correlation(first, second)
    except statistics.StatisticsError:
        return None


def headline(answer: Answer) -> list[str]:
    """What came out, a sentence for each group."""
    tell: Any = {"table": _of_table, "purity": _of_purity, "gradients": _of_gradients}.get(
        answer.experiment.draws, _of_sweep
    )
    sentences = []
    for group in answer.groups:
        said = tell(group) if group.runs else "nothing measured yet."
        same = [other for other in answer.groups if other.data == group.data]
        apart = f" (protocol {group.protocol[:4]})" if len(same) > 1 else ""
        sentences.append(f"{group.title}{apart}: {said}" if len(answer.groups) > 1 else said[:1].upper() + said[1:])
    return sentences


def number(cell: Cell, signed: bool = False) -> str:
    """``51.83 ± 0.42`` with the deviation where there are seeds enough."""
    if cell.mean is None:
        return "–"
    mean = f"{cell.mean:+.2f}" if signed else f"{cell.mean:.2f}"
    return (mean if cell.deviation is None else f"{mean} ± {cell.deviation:.2f}").replace("-", "−")


def _of_table(group: Group) -> str:
    score = group.score
    measured = [line for line in group.rows if line.cell(score).count]
    compared = [line for line in measured if line.difference(score).count]
    if len({line.against for line in compared}) == 1 and len(measured) > 6:
        ordered = sorted(measured, key=lambda line: -line.cell(score).mean)
        best = ordered[0]
        said = f"best is {best.title} with {number(best.cell(score))} % top-1"
        psm = next((line for line in ordered if line.title == "PSM"), None)
        if psm and psm is not best:
            said += f"; PSM is number {ordered.index(psm) + 1} of {len(ordered)} with {number(psm.cell(score))} %"
        pairs = [(line.cell(score).mean, line.paper[0]) for line in measured if line.paper]
        agreement = rank_correlation(pairs)
        if agreement is not None:
            said += f". The order agrees with the paper's by a rank correlation of {agreement:.2f}".replace("-", "−")
        return f"{said}."
    parts = []
    for line in compared:
        paper = f" (paper {line.paper_differences[0]:+.2f})".replace("-", "−") if line.paper_differences else ""
        parts.append(f"{line.title} {number(line.difference(score), signed=True)}{paper}")
    if not parts:
        return "no two rows can be compared yet."
    against = {line.against for line in compared}
    to = f", against {against.pop()}" if len(against) == 1 else ""
    return f"in points of top-1{to}: {'; '.join(parts)}."


def _of_purity(group: Group) -> str:
    parts = []
    for line in group.rows:
        one, many = line.curves.get("purity_top1", {}), line.curves.get("hit_top5", {})
        if one and many:
            first, last = min(one), max(one)
            parts.append(
                f"with {line.title} the nearest row has the query's label in {one[first].mean:.1f} % of cases in epoch "
                f"{first} and {one[last].mean:.1f} % in epoch {last}, at least one of the five nearest in "
                f"{many[first].mean:.1f} % and {many[last].mean:.1f} %"
            )
    return "; ".join(parts) + "." if parts else "nothing measured yet."


def _of_gradients(group: Group) -> str:
    line = next((line for line in group.rows if line.ranks), None)
    if line is None:
        return "nothing measured yet."
    first, last = line.ranks[0], line.ranks[-1]

    def kept(name: str) -> float:
        return 100 * last[name].mean / first[name].mean

    said = (
        f"from rank 1 to rank {len(line.ranks)} the mean similarity falls from {first['similarity'].mean:.2f} to "
        f"{last['similarity'].mean:.2f}, and dL/ds under InfoNCE to {kept('softmax_slope_mean'):.0f} % of what it is "
        f"at rank 1, its variance to {kept('softmax_slope_variance'):.0f} %; the positive is number "
        f"{first['positive_rank'].mean:.0f} on average (median {first['positive_rank_median'].mean:.0f})"
    )
    if "same_class" in first:
        said += (
            f"; {100 * first['same_class'].mean:.0f} % of the first negatives have the query's label, "
            f"{100 * last['same_class'].mean:.0f} % of the last"
        )
    return f"{said}.".replace("-", "−")


def _of_sweep(group: Group) -> str:
    score = group.score
    measured = [line for line in group.rows if line.cell(score).count]
    best = max(measured, key=lambda line: line.cell(score).mean)
    means = [line.cell(score).mean for line in measured]
    said = f"best is {best.title} with {number(best.cell(score))} % top-1; all lie within"
    said += f" {max(means) - min(means):.2f} points"
    reference = next((line for line in measured if line.against is None), None)
    if reference and (spread := reference.cell(score).deviation) is not None:
        said += f"; {reference.title} alone varies by ± {spread:.2f} over {reference.cell(score).count} seeds"
    return f"{said}."
