"""A study as pages: one for each experiment and one for all, each a single file, tables and figures beside it."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jinja2 import Environment

from psm.experiments.aggregate import PURITY, Answer, Cell, Group, Line, headline, number, read_answers
from psm.experiments.display import duration
from psm.experiments.figures import Drawing, drawings
from psm.experiments.results import Study, read_table, write_table
from psm.reporting.templates import template_environment
from psm.utils.errors import UserError
from psm.utils.files import write_atomically, write_text_atomically


@dataclass(frozen=True)
class Shown:
    """A figure as a page holds it."""

    svg: str
    caption: str


@dataclass(frozen=True)
class Columns:
    """A group as a table shows it."""

    group: Group
    note: str  # tells groups on the same data apart

    def __getattr__(self, name: str) -> Any:
        return getattr(self.group, name)

    @property
    def printed(self) -> bool:
        return any(line.paper for line in self.group.lines)

    @property
    def other(self) -> str:
        return "knn" if self.group.score == "linear" else "linear"

    def of(self, title: str) -> Line | None:
        return self.group.line(title)


def write_report(study: Study) -> Path:
    """Write (or renew) all pages, tables and figures of a study below its report folder; gives the page for all."""
    answers = read_answers(study)
    if not answers:
        raise UserError(f"out={study.folder} holds no results: `psm experiment run NAME... out={study.folder}` first.")
    environment = _environment()
    entries = []
    for answer in answers:
        drawn = drawings(answer)
        shown = [Shown(drawing.svg(), drawing.caption) for drawing in drawn]
        files = [*_write_figures(study, drawn, shown), *_write_tables(study, answer)]
        _write(
            study, answer.name, environment.get_template("study-experiment.html").render(**_page(answer, shown, files))
        )
        first = shown[: max(1, len(shown)) if answer.experiment.draws != "table" else 2]
        entries.append(_entry(answer, first))
    return _write(
        study, "index", environment.get_template("study-index.html").render(**_index(study, answers, entries))
    )


def _environment() -> Environment:
    environment = template_environment()
    environment.filters |= {"points": _points, "thousands": lambda count: f"{count:,}", "duration": duration}
    return environment


def _points(value: float, signed: bool = False) -> str:
    return (f"{value:+.2f}" if signed else f"{value:.2f}").replace("-", "−")


def label(name: str) -> str:
    """``Table 1`` for table1."""
    return re.sub(r"(\d+)$", r" \1", name).capitalize()


def _columns(answer: Answer) -> list[Columns]:
    """The groups with what tells those on the same data apart: what was trained, and for how long."""
    data = [group.data for group in answer.groups]
    notes = []
    for group in answer.groups:
        facts = group.facts
        told = f"{facts['encoder']}, {facts['epochs']} epochs, " if facts else ""
        notes.append(f"{told}protocol {group.protocol[:4]}" if data.count(group.data) > 1 else "")
    return [Columns(group, note) for group, note in zip(answer.groups, notes, strict=True)]


def _named(group: Group, line: Line) -> dict[str, Any]:
    return {"data": group.data, "protocol": group.protocol, "title": line.title}


def _page(answer: Answer, shown: Sequence[Shown], files: Sequence[str]) -> dict[str, Any]:
    groups = _columns(answer)
    rows: dict[str, Line] = {}
    for group in answer.groups:
        for line in group.lines:
            rows.setdefault(line.title, line)
    compared = list(dict.fromkeys(line.against for line in rows.values() if line.against))
    counts = [cell.count for group in answer.groups for line in group.rows for cell in line.scores.values()]
    return {
        "experiment": answer.experiment,
        "label": label(answer.name),
        "sentences": headline(answer),
        "groups": groups,
        "rows": [
            {"title": title, "baseline": line.baseline, "reference": title in compared} for title, line in rows.items()
        ],
        "compared": compared[0] if len(compared) == 1 else "the same method without PNSM" if compared else "nothing",
        "printed": any(group.printed for group in groups),
        "seeds": "–".join(map(str, sorted({min(counts), max(counts)}))) if counts else "",
        "tabled": answer.experiment.draws in ("table", "bars", "sweep"),
        "shown": shown,
        "commands": _commands(answer),
        "files": files,
    }


def _commands(answer: Answer) -> list[str]:
    told = list(dict.fromkeys(command for group in answer.groups for command in group.commands))
    return told or [f"psm experiment run {answer.name}"]


def _entry(answer: Answer, shown: Sequence[Shown]) -> dict[str, Any]:
    experiment = answer.experiment
    return {
        "name": answer.name,
        "label": label(answer.name),
        "title": experiment.title,
        "question": experiment.question,
        "claim": experiment.claim,
        "sentences": headline(answer),
        "shown": shown,
    }


def _index(study: Study, answers: Sequence[Answer], entries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What the page for all says: runs are counted once, however many experiments share them."""
    known = {(row["run"], row["evaluated"]): row for row in read_table(study.table("results"))}
    places = [row for row in read_table(study.table("plan")) if "/" not in row["run"]]
    planned = {(row["run"], row["evaluated"]) for row in places}
    failed = [row for row in read_table(study.table("failures")) if any(run == row["run"] for run, _ in planned)]
    done = planned & known.keys()
    protocols: dict[tuple[str, str], Group] = {}
    for group in (group for answer in answers for group in answer.groups):
        protocol = (group.data, group.protocol)
        mine = {(row["run"], row["evaluated"]) for row in places if (row["data"], row["protocol"]) == protocol}
        seconds = sum(float(known[key]["seconds"] or 0) for key in mine & done)
        before = protocols.get(protocol)
        if before is None or (group.facts and not before.facts):
            protocols[protocol] = replace(group, runs=len(mine & done), planned=len(mine), seconds=seconds)
    return {
        "entries": entries,
        "done": len(done),
        "planned": len(planned),
        "missing": len(planned - known.keys()) - len(failed),
        "failed": failed,
        "seconds": sum(float(known[key]["seconds"] or 0) for key in done),
        "protocols": list(protocols.values()),
    }


def _write_figures(study: Study, drawn: Sequence[Drawing], shown: Sequence[Shown]) -> list[str]:
    names = []
    for drawing, page in zip(drawn, shown, strict=True):
        png = drawing.png()
        _write(study, drawing.name, page.svg, "svg")
        write_atomically(study.report / f"{drawing.name}.png", lambda file, png=png: file.write(png))
        names += [f"{drawing.name}.svg", f"{drawing.name}.png"]
    return names


def _write(study: Study, name: str, content: str, kind: str = "html") -> Path:
    path = study.report / f"{name}.{kind}"
    write_text_atomically(path, content)
    return path


def _write_tables(study: Study, answer: Answer) -> list[str]:
    """The numbers of an experiment as CSV and, where they are a table, as Markdown."""
    rows = {"purity": _purity_rows, "gradients": _gradient_rows}.get(answer.experiment.draws, _table_rows)(answer)
    write_table(study.report / f"{answer.name}.csv", rows)
    if answer.experiment.draws in ("purity", "gradients"):
        return [f"{answer.name}.csv"]
    _write(study, answer.name, _markdown(answer), "md")
    return [f"{answer.name}.md", f"{answer.name}.csv"]


def _table_rows(answer: Answer) -> list[dict[str, Any]]:
    rows = []
    for group in answer.groups:
        for line in group.lines:
            for score in dict.fromkeys(score for score, _ in line.scores) or ("linear",):
                row = _named(group, line) | {"score": score}
                for top in ("top1", "top5"):
                    cell, difference = line.cell(score, top), line.difference(score, top)
                    row |= {top: cell.mean, f"{top}_deviation": cell.deviation}
                    row |= {f"{top}_difference": difference.mean, f"{top}_difference_deviation": difference.deviation}
                row |= {"seeds": line.cell(score).count, "against": line.against}
                if score == "linear" and line.paper:
                    row |= {"paper_top1": line.paper[0], "paper_top5": line.paper[1]}
                    if line.paper_differences:
                        changes = [round(change, 2) for change in line.paper_differences]
                        row |= {"paper_top1_difference": changes[0], "paper_top5_difference": changes[1]}
                rows.append(row)
    return rows


def _purity_rows(answer: Answer) -> list[dict[str, Any]]:
    rows = []
    for group in answer.groups:
        for line in group.rows:
            for epoch in sorted({epoch for points in line.curves.values() for epoch in points}):
                row = _named(group, line) | {"epoch": epoch}
                for name in PURITY:
                    cell = line.curves.get(name, {}).get(epoch, Cell())
                    row |= {name: cell.mean, f"{name}_deviation": cell.deviation, "seeds": cell.count}
                rows.append(row)
    return rows


def _gradient_rows(answer: Answer) -> list[dict[str, Any]]:
    return [
        _named(group, line) | {"rank": place + 1} | {name: cell.mean for name, cell in rank.items()}
        for group in answer.groups
        for line in group.rows
        for place, rank in enumerate(line.ranks)
    ]


def _markdown(answer: Answer) -> str:
    """The table in Markdown, one for each data set and protocol."""
    lines = [f"# {label(answer.name)}: {answer.experiment.title}", "", answer.experiment.question, ""]
    for columns in _columns(answer):
        group, printed = columns.group, columns.printed
        note = f" ({columns.note})" if columns.note else ""
        lines += [f"## {group.title}{note}", ""]
        paper = ["paper top-1", "paper top-5", "paper Δ"] if printed else []
        main, other = group.score, columns.other
        heads = ["", *paper, f"{main} top-1", f"{main} top-5", "Δ top-1", f"{other} top-1", "seeds"]
        lines += [f"| {' | '.join(heads)} |", f"| --- {'| ---: ' * (len(heads) - 1)}|"]
        for line in group.lines:
            cells = []
            if printed:
                cells += [_points(x) for x in line.paper] if line.paper else ["", ""]
                cells.append(_points(line.paper_differences[0], True) if line.paper_differences else "")
            cells += [number(line.cell(main)), number(line.cell(main, "top5"))]
            cells.append(number(line.difference(main), signed=True) if line.against else "")
            cells += [number(line.cell(other)), f"{line.cell(main).count} of {line.planned}"]
            lines.append(f"| {' | '.join([line.title, *cells])} |")
        lines += ["", *(f"Not run yet: {missing}." for missing in group.missing)]
        lines += [f"Failed: {row['title']}, seed {row['seed']}: {row['reason']}." for row in group.failed]
        lines += [""]
    lines += [*headline(answer), "", "Repeat it:", "", *(f"    {command}" for command in _commands(answer)), ""]
    return "\n".join(lines)
