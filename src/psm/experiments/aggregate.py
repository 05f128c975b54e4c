"""Results of a study: means and 95 % intervals over seeds, differences to a reference, and the paper's numbers.

Reads the CSV files of the study only. Imports nothing heavy.
"""

import logging
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from psm.experiments.catalog import EXPERIMENTS, Configuration, Experiment
from psm.experiments.plan import BASELINES, data_title
from psm.experiments.results import GRADIENT_COLUMNS, Study, read_csv
from psm.experiments.tuned import FROM
from psm.utils.errors import UserError
from psm.utils.statistics import Interval, t_interval

log = logging.getLogger("psm")

PURITY_METRICS = ("purity_top1", "purity_top5", "hit_top5")

CsvRow = Mapping[str, str]
RunKey = tuple[str, str]  # run, evaluation hash
ScoreKey = tuple[str, str]  # knn or linear, top1 or top5


@dataclass(frozen=True)
class SeedStats:
    """One metric measured with several seeds."""

    values: Mapping[int, float] = field(default_factory=dict)  # by seed

    @property
    def count(self) -> int:
        return len(self.values)

    @property
    def mean(self) -> float:
        """Mean over seeds; raises ``StatisticsError`` without values."""
        return statistics.fmean(self.values.values())

    @property
    def std(self) -> float | None:
        """Sample standard deviation over seeds (n - 1); None for fewer than two."""
        return statistics.stdev(self.values.values()) if self.count > 1 else None

    @property
    def interval(self) -> Interval | None:
        """95 % interval of the mean over seeds (t with n - 1 degrees of freedom); None for fewer than two."""
        return t_interval(self.values.values())

    @property
    def half_width(self) -> float | None:
        """Half of the 95 % interval: what stands after ± on pages."""
        return None if self.interval is None else self.interval.half_width

    @property
    def is_clear(self) -> bool:
        """True if the 95 % interval does not hold 0: of a difference, that it is more than the spread over seeds."""
        return self.interval is not None and 0 not in self.interval

    def minus(self, other: "SeedStats") -> "SeedStats":
        """Differences per seed: runs of equal seeds start from equal weights and see equal images."""
        return SeedStats({seed: x - other.values[seed] for seed, x in self.values.items() if seed in other.values})


@dataclass(frozen=True)
class ResultRow:
    """One row of a table or point of a figure."""

    title: str
    reference: str | None  # title of the row that it is compared with
    value: float | None  # position on the axis of a sweep
    is_baseline: bool  # raw pixels or an untrained encoder
    highlight: bool
    group: str
    series: str
    shared: bool  # of a grid: the settings that all methods share
    scores: Mapping[ScoreKey, SeedStats]
    differences: Mapping[ScoreKey, SeedStats]  # to the reference
    paper: tuple[float, float] | None  # top-1 and top-5
    paper_differences: tuple[float, float] | None
    planned: int  # number of seeds
    steps: int  # of its runs; 0 without results
    curves: Mapping[str, Mapping[int, SeedStats]]  # purity metric -> epoch -> stats
    ranks: Sequence[Mapping[str, SeedStats]]  # figure 2: rank -> column -> stats

    def score(self, kind: str, top: str = "top1") -> SeedStats:
        return self.scores.get((kind, top), SeedStats())

    def difference(self, kind: str, top: str = "top1") -> SeedStats:
        return self.differences.get((kind, top), SeedStats())


@dataclass(frozen=True)
class ResultTable:
    """The rows of an experiment on one data set under one protocol: only these are compared."""

    data: str
    protocol: str
    rows: Sequence[ResultRow]
    settings: CsvRow  # a row of results.csv, which has the settings of the protocol; empty without results
    by_row: frozenset[str]  # settings that its rows do not share
    seconds: float
    runs: int
    planned: int
    missing: Sequence[str]
    failed: Sequence[CsvRow]
    hardware: Sequence[str]
    commits: Sequence[str]
    versions: Sequence[str]
    dates: tuple[str, str] | None
    commands: Sequence[str]

    @property
    def title(self) -> str:
        return data_title(self.data)

    @property
    def main_score(self) -> str:
        """The score that rows are compared by: linear, or knn where the linear protocol was switched off."""
        return "linear" if any(row.score("linear").count for row in self.rows) else "knn"

    @property
    def other_score(self) -> str:
        return "knn" if self.main_score == "linear" else "linear"

    @property
    def has_paper(self) -> bool:
        """True if the paper has numbers for any row."""
        return any(row.paper for row in self.rows)

    @property
    def method_rows(self) -> list[ResultRow]:
        """The rows without the baselines."""
        return [row for row in self.rows if not row.is_baseline]

    @property
    def scored_on(self) -> str:
        """The images that scores are about."""
        share = self.settings.get("images.holdout")
        return f"held-out training images ({float(share):.0%} of each class)" if share else "the test images"

    def best_rows(self) -> dict[str, ResultRow]:
        """Of a grid the best measured row of each group: by the main score, then by the other."""
        best: dict[str, ResultRow] = {}
        for row in self.method_rows:
            if row.group and row.score(self.main_score).count:
                best[row.group] = max(best.get(row.group, row), row, key=self._merit)
        return best

    def chosen_rows(self) -> dict[str, ResultRow]:
        """Of a grid the row that each group gets: the best, or the shared settings within one standard error of it.

        That is the one-standard-error rule: of what the held-out images cannot tell apart, what needs no choice.
        """
        best = self.best_rows()
        shared = {row.group: row for row in self.method_rows if row.shared and row.score(self.main_score).count}
        return {
            group: shared[group] if group in shared and not self._is_ahead(row, shared[group]) else row
            for group, row in best.items()
        }

    def _is_ahead(self, row: ResultRow, other: ResultRow) -> bool:
        """True if a row is ahead by more than the standard error of the difference of two accuracies."""
        shares = [one.score(self.main_score).mean / 100 for one in (row, other)]
        runs = max(1, row.score(self.main_score).count)
        error = math.sqrt(sum(share * (1 - share) for share in shares) / (runs * int(self.settings["test_images"])))
        return shares[0] - shares[1] > error

    def _merit(self, row: ResultRow) -> tuple[float, float]:
        other = row.score(self.other_score)
        return row.score(self.main_score).mean, other.mean if other.count else 0.0

    def row(self, title: str | None) -> ResultRow | None:
        return next((row for row in self.rows if row.title == title), None)


@dataclass(frozen=True)
class ExperimentResult:
    """An experiment with its measured tables."""

    experiment: Experiment
    tables: Sequence[ResultTable]

    @property
    def name(self) -> str:
        return self.experiment.name


@dataclass(frozen=True)
class StudyRows:
    """The rows of a study's CSV files, by run."""

    results: Mapping[RunKey, list[CsvRow]]
    curves: Mapping[RunKey, list[CsvRow]]
    gradients: Mapping[RunKey, list[CsvRow]]
    failures: Mapping[str, CsvRow]  # by run name


def load_results(study: Study) -> list[ExperimentResult]:
    """All experiments planned in a study, in the catalog's order."""
    try:
        return _load_results(study)
    except (KeyError, ValueError, TypeError) as error:
        raise UserError(
            f"The CSV files of {study.folder} do not hold what psm writes ({type(error).__name__}: "
            f"{str(error)[:100]!r}): they were damaged or edited. Restore them; what has a record is written again by "
            "the next `psm experiment run`."
        ) from None


def _load_results(study: Study) -> list[ExperimentResult]:
    rows = StudyRows(
        _by_run(read_csv(study.csv("results"))),
        _by_run(read_csv(study.csv("curves"))),
        _by_run(read_csv(study.csv("gradients"))),
        {row["run"]: row for row in read_csv(study.csv("failures"))},
    )
    planned: dict[str, dict[tuple[str, str], list[CsvRow]]] = {}
    for entry in read_csv(study.csv("plan")):
        planned.setdefault(entry["experiment"], {}).setdefault((entry["data"], entry["protocol"]), []).append(entry)
    if unknown := [name for name in planned if name not in EXPERIMENTS]:
        log.warning(
            "%s: %s is left out of the pages: give the plugin that registers it, plugins=FILE.py",
            study.folder, " and ".join(unknown),
        )  # fmt: skip
    return [
        ExperimentResult(
            experiment,
            [_table(experiment, data, protocol, entries, rows) for (data, protocol), entries in planned[name].items()],
        )
        for name, experiment in EXPERIMENTS.items()
        if name in planned
    ]


def _by_run(rows: Iterable[CsvRow]) -> dict[RunKey, list[CsvRow]]:
    found: dict[RunKey, list[CsvRow]] = {}
    for row in rows:
        found.setdefault(_run_key(row), []).append(row)
    return found


def _run_key(row: CsvRow) -> RunKey:
    return row["run"], row["evaluation_hash"]


def _table(experiment: Experiment, data: str, protocol: str, entries: Sequence[CsvRow], rows: StudyRows) -> ResultTable:
    titles = {configuration.title for configuration in experiment.configurations}
    of_methods = [entry for entry in entries if entry["title"] in titles]
    done = [entry for entry in of_methods if _run_key(entry) in rows.results]
    undone = [entry for entry in of_methods if entry not in done]
    results = [rows.results[_run_key(entry)][0] for entry in done]
    dates = sorted(row["date"] for row in results)
    return ResultTable(
        data=data,
        protocol=protocol,
        rows=_table_rows(experiment, data, entries, rows),
        settings=results[-1] if results else {},
        by_row=frozenset(key for key in results[-1] if len({row[key] for row in results}) > 1)
        if results
        else frozenset(),
        seconds=sum(float(row["seconds"] or 0) for row in results),
        runs=len(done),
        planned=len(of_methods),
        missing=[f"{row['title']}, seed {row['seed']}" for row in undone if row["run"] not in rows.failures],
        failed=[
            dict(rows.failures[row["run"]]) | {"title": row["title"]} for row in undone if row["run"] in rows.failures
        ],
        hardware=_distinct(row["hardware"] for row in results),
        commits=_distinct(row["commit"] for row in results),
        versions=_distinct(f"psm {row['psm']}, torch {row['torch']}, threads: {row['threads']}" for row in results),
        dates=(dates[0], dates[-1]) if dates else None,
        commands=_distinct(entry["command"] for entry in entries if entry.get("command")),
    )


def _table_rows(experiment: Experiment, data: str, entries: Sequence[CsvRow], rows: StudyRows) -> list[ResultRow]:
    """The planned rows of an experiment on a data set: the baselines, then the catalog's order."""

    def by_seed(table: Mapping[RunKey, list[CsvRow]], title: str) -> dict[int, list[CsvRow]]:
        mine = [entry for entry in entries if entry["title"] == title]
        return {int(entry["seed"]): table[_run_key(entry)] for entry in mine if _run_key(entry) in table}

    configurations = {row.title: row for row in experiment.configurations}
    planned = [entry["title"] for entry in entries]
    titles = [title for title in (*BASELINES.values(), *configurations) if title in planned]
    scores = {title: _score_stats(by_seed(rows.results, title)) for title in titles}
    return [
        _row(
            title,
            configurations.get(title),
            scores,
            experiment.paper.get(data, {}),
            planned.count(title),
            _steps(by_seed(rows.results, title)),
            _curve_stats(by_seed(rows.curves, title)),
            _rank_stats(by_seed(rows.gradients, title)),
        )
        for title in titles
    ]


def _distinct(values: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(values))


def _steps(by_seed: Mapping[int, Sequence[CsvRow]]) -> int:
    """Steps of the runs of a row, which differ in the seed only."""
    found = {
        int(row["epochs"]) * (int(row["images"]) // int(row["batch_size"])) for rows in by_seed.values() for row in rows
    }
    return max(found, default=0)


def _score_stats(by_seed: Mapping[int, Sequence[CsvRow]]) -> dict[ScoreKey, SeedStats]:
    found: dict[ScoreKey, dict[int, float]] = {}
    for seed, rows in by_seed.items():
        for row in rows:
            for top in ("top1", "top5"):  # of several k or temperatures the first counts; results.csv has all
                found.setdefault((row["score"], top), {}).setdefault(seed, float(row[top]))
    return {key: SeedStats(values) for key, values in found.items()}


def _row(
    title: str,
    configuration: Configuration | None,
    scores: Mapping[str, Mapping[ScoreKey, SeedStats]],
    printed: Mapping[str, tuple[float, float]],
    planned: int,
    steps: int,
    curves: Mapping[str, Mapping[int, SeedStats]],
    ranks: Sequence[Mapping[str, SeedStats]],
) -> ResultRow:
    """A row with its differences to the reference row; ``configuration`` is None for a baseline."""
    reference = configuration.reference if configuration else None
    other = scores.get(reference, {}) if reference else {}
    paper, paper_reference = printed.get(title), printed.get(reference or "")
    return ResultRow(
        title=title,
        reference=reference,
        value=configuration.value if configuration else None,
        is_baseline=configuration is None,
        highlight=bool(configuration and configuration.highlight),
        group=configuration.group if configuration else "",
        series=configuration.series if configuration else "",
        shared=bool(configuration and configuration.shared),
        scores=scores[title],
        differences={key: stats.minus(other[key]) for key, stats in scores[title].items() if key in other},
        paper=paper,
        paper_differences=(
            (paper[0] - paper_reference[0], paper[1] - paper_reference[1]) if paper and paper_reference else None
        ),
        planned=planned,
        steps=steps,
        curves=curves,
        ranks=ranks,
    )


def _curve_stats(by_seed: Mapping[int, Sequence[CsvRow]]) -> dict[str, dict[int, SeedStats]]:
    """Purity metric -> epoch -> percentages over seeds."""
    found: dict[str, dict[int, dict[int, float]]] = {}
    for seed, rows in by_seed.items():
        for row in rows:
            for name in PURITY_METRICS:
                if row.get(name):
                    found.setdefault(name, {}).setdefault(int(row["epoch"]), {})[seed] = 100 * float(row[name])
    return {name: {epoch: SeedStats(v) for epoch, v in sorted(epochs.items())} for name, epochs in found.items()}


def _rank_stats(by_seed: Mapping[int, Sequence[CsvRow]]) -> list[dict[str, SeedStats]]:
    """For each rank of figure 2: column -> values over seeds."""
    found: dict[int, dict[str, dict[int, float]]] = {}
    needed = [name for name in GRADIENT_COLUMNS if name != "same_class"]  # which needs labels
    for seed, rows in by_seed.items():
        for row in (row for row in rows if all(row.get(name) for name in needed)):
            for name in GRADIENT_COLUMNS:
                if row.get(name):
                    found.setdefault(int(row["rank"]), {}).setdefault(name, {})[seed] = float(row[name])
    return [{name: SeedStats(v) for name, v in found[rank].items()} for rank in sorted(found)]


def rank_correlation(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Spearman's rank correlation, ties sharing their ranks; None for fewer than three pairs or constant values."""
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


def choices(result: ExperimentResult) -> dict[str, dict[str, dict[str, Any]]]:
    """Data -> method -> the settings that a grid chooses, and where they come from."""
    rows = {row.title: row for row in result.experiment.configurations}
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for table in result.tables:
        for group, best in table.chosen_rows().items():
            score = table.main_score
            measured = f"{result.name}: {score} {format_stats(best.score(score))} % on {table.scored_on}"
            scale = (
                f"{table.settings['encoder']}, batch {table.settings['batch_size']}, {table.settings['epochs']} epochs"
            )
            keys = {k: v for k, v in rows[best.title].settings.items() if k not in ("method", "images.holdout")}
            found.setdefault(table.data, {})[group] = {FROM: f"{measured} ({scale})", **keys}
    return found


def headline(result: ExperimentResult) -> list[str]:
    """The main result in a sentence per table."""
    summarize = _SUMMARIES[result.experiment.kind]
    sentences = []
    for table in result.tables:
        summary = summarize(table) if table.runs else "nothing measured yet."
        same_data = [other for other in result.tables if other.data == table.data]
        protocol = f" (protocol {table.protocol[:4]})" if len(same_data) > 1 else ""
        named = f"{table.title}{protocol}: {summary}"
        sentences.append(named if len(result.tables) > 1 else summary[:1].upper() + summary[1:])
    return sentences


def format_stats(stats: SeedStats, signed: bool = False) -> str:
    """``51.83 ± 0.42``, the mean and half of its 95 % interval; the mean alone for a single seed."""
    if not stats.count:
        return "–"
    mean = format_points(stats.mean, signed)
    return mean if stats.half_width is None else f"{mean} ± {stats.half_width:.2f}"


def format_points(value: float, signed: bool = False) -> str:
    """A percentage with two decimals and a true minus sign."""
    return (f"{value:+.2f}" if signed else f"{value:.2f}").replace("-", "−")


def _summarize_table(table: ResultTable) -> str:
    score = table.main_score
    measured = [row for row in table.method_rows if row.score(score).count]
    compared = [row for row in measured if row.difference(score).count]
    if len({row.reference for row in compared}) == 1 and len(measured) > 6:
        return _summarize_ranking(measured, score)
    if not compared:
        return "no two rows can be compared yet."
    parts = []
    references = {row.reference for row in compared}
    for row in compared:
        plain = len(references) == 1 or row.title.startswith(row.reference or "")  # then it is clear what it is beside
        beside = "" if plain else f" on {row.reference}"
        paper = f" (paper {format_points(row.paper_differences[0], True)})" if row.paper_differences else ""
        parts.append(f"{row.title} {format_stats(row.difference(score), signed=True)}{beside}{paper}")
    to = f", against {references.pop()}" if len(references) == 1 else ""
    intervals = ", with 95 % intervals" if any(row.difference(score).count > 1 for row in compared) else ""
    return f"in points of top-1{to}{intervals}: {'; '.join(parts)}."


def _best(row: ResultRow, score: str) -> str:
    """The best row and its score, after how many steps where that is known."""
    when = f"after {row.steps:,} steps the best is" if row.steps else "best is"
    return f"{when} {row.title} with {format_stats(row.score(score))} % top-1"


def _summarize_ranking(measured: Sequence[ResultRow], score: str) -> str:
    """The best row, the place of PSM, and the agreement with the paper's order."""
    ordered = sorted(measured, key=lambda row: -row.score(score).mean)
    best = ordered[0]
    text = _best(best, score)
    psm = next((row for row in ordered if row.title == "PSM"), None)
    if psm and psm is not best:
        text += f"; PSM is number {ordered.index(psm) + 1} of {len(ordered)} with {format_stats(psm.score(score))} %"
    agreement = rank_correlation([(row.score(score).mean, row.paper[0]) for row in measured if row.paper])
    if agreement is not None:
        text += f". The order agrees with the paper's by a rank correlation of {format_points(agreement)}"
    return f"{text}."


def _summarize_purity(table: ResultTable) -> str:
    parts = []
    for row in table.method_rows:
        top1, hit = row.curves.get("purity_top1", {}), row.curves.get("hit_top5", {})
        both = top1.keys() & hit.keys()
        if both:
            first, last = min(both), max(both)
            parts.append(
                f"with {row.title} the nearest row has the query's label in {top1[first].mean:.1f} % of cases in epoch "
                f"{first} and {top1[last].mean:.1f} % in epoch {last}, at least one of the five nearest in "
                f"{hit[first].mean:.1f} % and {hit[last].mean:.1f} %"
            )
    return "; ".join(parts) + "." if parts else "nothing measured yet."


def _summarize_gradients(table: ResultTable) -> str:
    row = next((row for row in table.method_rows if row.ranks), None)
    if row is None:
        return "nothing measured yet."
    first, last = row.ranks[0], row.ranks[-1]

    def relative(name: str) -> float:
        return 100 * last[name].mean / first[name].mean

    text = (
        f"from rank 1 to rank {len(row.ranks)} the mean similarity falls from {first['similarity'].mean:.2f} to "
        f"{last['similarity'].mean:.2f}, and dL/ds under InfoNCE to {relative('softmax_slope_mean'):.0f} % of that "
        f"at rank 1, its variance to {relative('softmax_slope_variance'):.0f} %; the positive is number "
        f"{first['positive_rank'].mean:.0f} on average (median {first['positive_rank_median'].mean:.0f})"
    )
    if "same_class" in first:
        text += (
            f"; {100 * first['same_class'].mean:.0f} % of the first negatives have the query's label, "
            f"{100 * last['same_class'].mean:.0f} % of the last"
        )
    return f"{text}.".replace("-", "−")


def _summarize_sweep(table: ResultTable) -> str:
    score = table.main_score
    measured = [row for row in table.method_rows if row.score(score).count]
    best = max(measured, key=lambda row: row.score(score).mean)
    means = [row.score(score).mean for row in measured]
    text = f"{_best(best, score)}; all lie within {max(means) - min(means):.2f} points"
    reference = next((row for row in measured if row.reference is None), None)
    if reference and (half := reference.score(score).half_width) is not None:
        seeds = reference.score(score).count
        text += f"; the 95 % interval of {reference.title} alone is ± {half:.2f}, from {seeds} seeds"
    return f"{text}."


def _summarize_grid(table: ResultTable) -> str:
    score, parts, edges = table.main_score, [], []
    for group, row in table.chosen_rows().items():
        parts.append(f"{row.title} ({format_stats(row.score(score))} %)")
        positions = [other.value for other in table.method_rows if other.group == group and other.value is not None]
        if row.value in (min(positions), max(positions)):
            edges.append(row.title)
    text = f"chosen on {table.scored_on}: {'; '.join(parts)}."
    return f"{text} At an end of the grid, which may be too narrow: {', '.join(edges)}." if edges else text


def _summarize_schedules(table: ResultTable) -> str:
    """The order of the methods at each number of steps."""
    score, parts = table.main_score, []
    for share in sorted({row.value for row in table.method_rows if row.value is not None}):
        rows = [row for row in table.method_rows if row.value == share and row.score(score).count]
        ordered = sorted(rows, key=lambda row: -row.score(score).mean)
        if ordered:
            named = ", ".join(f"{row.series} {format_stats(row.score(score))}" for row in ordered)
            parts.append(f"after {ordered[0].steps:,} steps {named}")
    return f"{'; '.join(parts)}."


_SUMMARIES: dict[str, Callable[[ResultTable], str]] = {
    "table": _summarize_table,
    "purity": _summarize_purity,
    "gradients": _summarize_gradients,
    "bars": _summarize_sweep,
    "sweep": _summarize_sweep,
    "grid": _summarize_grid,
    "schedules": _summarize_schedules,
}
