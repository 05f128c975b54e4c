"""A study as HTML pages, one per experiment and an index, with tables and figures as files beside them."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jinja2 import Environment

from psm.experiments.aggregate import (
    PURITY_METRICS,
    ExperimentResult,
    ResultRow,
    ResultTable,
    SeedStats,
    choices,
    format_points,
    format_stats,
    headline,
    load_results,
)
from psm.experiments.answer import answer
from psm.experiments.display import format_duration
from psm.experiments.figures import Drawing, drawings
from psm.experiments.results import Study, read_csv, write_csv
from psm.experiments.tuned import write_tuned
from psm.reporting.templates import template_environment
from psm.utils.errors import UserError
from psm.utils.files import write_atomically


@dataclass(frozen=True)
class PageFigure:
    """A figure as it is embedded in a page."""

    svg: str
    caption: str


@dataclass(frozen=True)
class TableColumns:
    """A table as a group of columns of a page."""

    table: ResultTable
    note: str  # distinguishes tables on the same data


def write_report(study: Study) -> Path:
    """Write all pages, tables and figures of a study into its report folder; gives the index page."""
    results = load_results(study)
    if not results:
        raise UserError(f"out={study.folder} holds no results: `psm experiment run NAME... out={study.folder}` first.")
    environment = _environment()
    summaries = []
    for result in results:
        drawn = drawings(result)
        figures = [PageFigure(drawing.svg(), drawing.caption) for drawing in drawn]
        files = [*_write_figures(study, drawn, figures), *_write_tables(study, result)]
        page = environment.get_template("study-experiment.html").render(**_page(result, figures, files))
        _write(study, result.name, page)
        on_index = figures[:2] if result.experiment.kind == "table" else figures
        summaries.append(_summary(result, on_index))
    index = environment.get_template("study-index.html").render(**_index(study, results, summaries))
    return _write(study, "index", index)


def _environment() -> Environment:
    environment = template_environment()
    environment.filters |= {
        "points": format_points,
        "thousands": lambda count: f"{count:,}",
        "duration": format_duration,
    }
    return environment


def label(name: str) -> str:
    """``Table 1`` for table1."""
    return re.sub(r"(\d+)$", r" \1", name).replace("-", " ").capitalize()


def _columns(result: ExperimentResult) -> list[TableColumns]:
    """The tables, those on the same data with a note on encoder, epochs and protocol."""
    data = [table.data for table in result.tables]
    columns = []
    for table in result.tables:
        used = table.settings
        trained = f"{used['encoder']}, {used['epochs']} epochs, " if used else ""
        note = f"{trained}protocol {table.protocol[:4]}" if data.count(table.data) > 1 else ""
        columns.append(TableColumns(table, note))
    return columns


def _page(result: ExperimentResult, figures: Sequence[PageFigure], files: Sequence[str]) -> dict[str, Any]:
    """What the template of an experiment's page needs."""
    columns = _columns(result)
    rows: dict[str, ResultRow] = {}
    for table in result.tables:
        for row in table.rows:
            rows.setdefault(row.title, row)
    references = list(dict.fromkeys(row.reference for row in rows.values() if row.reference))
    counts = [stats.count for table in result.tables for row in table.method_rows for stats in row.scores.values()]
    return {
        "experiment": result.experiment,
        "label": label(result.name),
        "sentences": headline(result),
        "columns": columns,
        "rows": [
            {"title": title, "is_baseline": row.is_baseline, "is_reference": title in references}
            for title, row in rows.items()
        ],
        "reference": _reference_name({title: row.reference for title, row in rows.items() if row.reference}),
        "has_reference": bool(references),
        "has_paper": any(table.has_paper for table in result.tables),
        "seeds": "–".join(map(str, sorted({min(counts), max(counts)}))) if counts else "",
        "has_table": result.experiment.kind not in ("purity", "gradients"),
        "scored_on": " and ".join(dict.fromkeys(table.scored_on for table in result.tables)),
        "figures": figures,
        "commands": _commands(result),
        "files": files,
    }


def _reference_name(compared: Mapping[str, str]) -> str:
    """What differences are taken to, by the titles that they are of: the row of most, and those of the others."""
    if not compared:
        return "nothing"
    (most, _), *_ = Counter(compared.values()).most_common()
    others = dict.fromkeys(reference for reference in compared.values() if reference != most)
    named = {one: " and ".join(f"“{title}”" for title, of in compared.items() if of == one) for one in others}
    return "".join([f"“{most}”", *(f", of {titles} to “{one}”" for one, titles in named.items())])


def _commands(result: ExperimentResult) -> list[str]:
    commands = list(dict.fromkeys(command for table in result.tables for command in table.commands))
    return commands or [f"psm experiment run {result.name}"]


def _summary(result: ExperimentResult, figures: Sequence[PageFigure]) -> dict[str, Any]:
    """What the index says of an experiment."""
    experiment = result.experiment
    return {
        "name": result.name,
        "label": label(result.name),
        "title": experiment.title,
        "question": experiment.question,
        "claim": experiment.claim,
        "sentences": headline(result),
        "figures": figures,
    }


def _index(study: Study, results: Sequence[ExperimentResult], summaries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What the template of the index needs. A run that several experiments share is counted once."""
    measured = {(row["run"], row["evaluation_hash"]): row for row in read_csv(study.csv("results"))}
    entries = [row for row in read_csv(study.csv("plan")) if "/" not in row["run"]]
    planned = {(row["run"], row["evaluation_hash"]) for row in entries}
    failed = [row for row in read_csv(study.csv("failures")) if any(run == row["run"] for run, _ in planned)]
    done = planned & measured.keys()

    def seconds(runs: set[tuple[str, str]]) -> float:
        return sum(float(measured[key]["seconds"] or 0) for key in runs)

    protocols: dict[tuple[str, str], ResultTable] = {}
    for table in (table for result in results for table in result.tables):
        protocol = (table.data, table.protocol)
        runs = {(row["run"], row["evaluation_hash"]) for row in entries if (row["data"], row["protocol"]) == protocol}
        earlier = protocols.get(protocol)
        if earlier is None or (table.settings and not earlier.settings):
            finished = runs & done
            protocols[protocol] = replace(table, runs=len(finished), planned=len(runs), seconds=seconds(finished))
    return {
        "answer": answer(results),
        "chart": next((row["figures"][0] for row in _leading(summaries) if row["figures"]), None),
        "experiments": summaries,
        "done": len(done),
        "planned": len(planned),
        "missing": len(planned - measured.keys()) - len(failed),
        "failed": failed,
        "seconds": seconds(done),
        "protocols": list(protocols.values()),
    }


def _leading(summaries: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The experiments by what the index should show first: methods over steps, then the table of methods."""
    order = ("schedules", "table1", "successor")
    return sorted((row for row in summaries if row["name"] in order), key=lambda row: order.index(row["name"]))


def _write_figures(study: Study, drawn: Sequence[Drawing], figures: Sequence[PageFigure]) -> list[str]:
    names = []
    for drawing, figure in zip(drawn, figures, strict=True):
        _write(study, drawing.name, figure.svg, "svg")
        _write(study, drawing.name, drawing.png(), "png")
        names += [f"{drawing.name}.svg", f"{drawing.name}.png"]
    return names


def _write(study: Study, name: str, content: str | bytes, suffix: str = "html") -> Path:
    path = study.report / f"{name}.{suffix}"
    encoded = content.encode() if isinstance(content, str) else content
    write_atomically(path, lambda file: file.write(encoded))
    return path


def _write_tables(study: Study, result: ExperimentResult) -> list[str]:
    """Write the numbers of an experiment as CSV and, of a table, as Markdown; gives the file names."""
    rows_of = {"purity": _purity_rows, "gradients": _gradient_rows}.get(result.experiment.kind, _score_rows)
    write_csv(study.report / f"{result.name}.csv", list(rows_of(result)), sealed=False)
    if result.experiment.kind in ("purity", "gradients"):
        return [f"{result.name}.csv"]
    _write(study, result.name, _markdown(result), "md")
    choices = _write_choices(study, result) if result.experiment.kind == "grid" else []
    return [f"{result.name}.md", f"{result.name}.csv", *choices]


def _write_choices(study: Study, result: ExperimentResult) -> list[str]:
    """Write the best settings of each data set and method for `tuned=FILE`; gives the file name."""
    found = choices(result)
    if not found:
        return []
    name = f"{result.name}.yaml"
    about = (
        f"What the grid {result.name} chooses for each data set and method on held-out training images:\n"
        "the best, or the shared settings within one standard error of it.\n"
        "psm experiment run table1 preset=tuned tuned=THIS FILE"
    )
    write_tuned(study.report / name, found, about)
    return [name]


def _row_columns(table: ResultTable, row: ResultRow) -> dict[str, Any]:
    return {"data": table.data, "protocol": table.protocol, "title": row.title}


def _stats_columns(name: str, stats: SeedStats) -> dict[str, float | None]:
    """Mean, standard deviation and 95 % interval over seeds."""
    low, high = stats.interval or (None, None)
    mean = stats.mean if stats.count else None
    return {name: mean, f"{name}_std": stats.std, f"{name}_low": low, f"{name}_high": high}


def _score_rows(result: ExperimentResult) -> Iterator[dict[str, Any]]:
    """A CSV row per row of a table and kind of score."""
    for table in result.tables:
        for row in table.rows:
            for kind in dict.fromkeys(kind for kind, _ in row.scores) or ("linear",):
                yield _row_columns(table, row) | {"score": kind} | _score_columns(row, kind)


def _score_columns(row: ResultRow, kind: str) -> dict[str, Any]:
    columns: dict[str, Any] = {}
    for top in ("top1", "top5"):
        columns |= _stats_columns(top, row.score(kind, top))
        columns |= _stats_columns(f"{top}_difference", row.difference(kind, top))
    columns |= {"seeds": row.score(kind).count, "reference": row.reference}
    if kind == "linear" and row.paper:
        columns |= {"paper_top1": row.paper[0], "paper_top5": row.paper[1]}
        if row.paper_differences:
            top1, top5 = (round(difference, 2) for difference in row.paper_differences)
            columns |= {"paper_top1_difference": top1, "paper_top5_difference": top5}
    return columns


def _purity_rows(result: ExperimentResult) -> Iterator[dict[str, Any]]:
    """A CSV row per epoch of each row."""
    for table in result.tables:
        for row in table.method_rows:
            for epoch in sorted({epoch for points in row.curves.values() for epoch in points}):
                columns = _row_columns(table, row) | {"epoch": epoch}
                for name in PURITY_METRICS:
                    stats = row.curves.get(name, {}).get(epoch, SeedStats())
                    columns |= _stats_columns(name, stats) | {"seeds": stats.count}
                yield columns


def _gradient_rows(result: ExperimentResult) -> Iterator[dict[str, Any]]:
    """A CSV row per rank of each row."""
    for table in result.tables:
        for row in table.method_rows:
            for rank, columns in enumerate(row.ranks, start=1):
                means = {name: stats.mean for name, stats in columns.items()}
                yield _row_columns(table, row) | {"rank": rank} | means


def _markdown(result: ExperimentResult) -> str:
    """The tables in Markdown, with the headline and the commands that repeat the experiment."""
    lines = [f"# {label(result.name)}: {result.experiment.title}", "", result.experiment.question, ""]
    for columns in _columns(result):
        note = f" ({columns.note})" if columns.note else ""
        lines += [f"## {columns.table.title}{note}", "", *_markdown_table(columns.table), ""]
        lines += [f"Not run yet: {missing}." for missing in columns.table.missing]
        lines += [f"Failed: {row['title']}, seed {row['seed']}: {row['reason']}." for row in columns.table.failed]
        lines += [""]
    lines += [
        *headline(result),
        "",
        "±: 95 % interval of the mean over seeds (t).",
        "",
        "Repeat it:",
        "",
        *(f"    {command}" for command in _commands(result)),
        "",
    ]
    return "\n".join(lines)


def _markdown_table(table: ResultTable) -> list[str]:
    main, other = table.main_score, table.other_score
    paper = ["paper top-1", "paper top-5", "paper Δ"] if table.has_paper else []
    heads = ["", *paper, f"{main} top-1", f"{main} top-5", "Δ top-1", f"{other} top-1", f"{other} Δ", "seeds"]
    lines = [f"| {' | '.join(heads)} |", f"| --- {'| ---: ' * (len(heads) - 1)}|"]
    for row in table.rows:
        cells = []
        if table.has_paper:
            cells += [format_points(x) for x in row.paper] if row.paper else ["", ""]
            cells.append(format_points(row.paper_differences[0], True) if row.paper_differences else "")
        cells += [format_stats(row.score(main)), format_stats(row.score(main, "top5"))]
        cells.append(format_stats(row.difference(main), signed=True) if row.reference else "")
        cells.append(format_stats(row.score(other)))
        cells.append(format_stats(row.difference(other), signed=True) if row.reference else "")
        cells.append(f"{row.score(main).count} of {row.planned}")
        lines.append(f"| {' | '.join([row.title, *cells])} |")
    return lines
