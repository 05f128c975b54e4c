"""Write the study's tables into README.md and docs/findings.md, and find numbers there that it does not have.

    python study/publish.py            # writes the tables
    python study/publish.py --check    # only says what differs from the study; exit code 1 if anything does

A table stands between `<!-- study: EXPERIMENT DATA -->` and `<!-- end -->`; all else in a page is left alone. Of every
`mean ± half` in a page both must be numbers of the study, rounded: a score or a difference with its 95 % interval. A
number that follows the name of a method ("HCL 67.6", "HCL's 67.6", "HCL has 67.6") must be a score of it, unless it
stands between `<!-- outside the study -->` and `<!-- end -->`.
"""

import itertools
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from psm.experiments.aggregate import ResultRow, ResultTable, SeedStats, load_results
from psm.experiments.answer import RANKINGS
from psm.experiments.results import Study
from psm.methods.plugins import load_plugins

STUDY = Path(__file__).resolve().parent
PLUGINS = (STUDY / "known_purity.py",)  # that register experiments of the study
PAGES = (STUDY.parent / "README.md", STUDY.parent / "docs" / "findings.md")
MARKED = re.compile(r"(<!-- study: ([\w-]+) ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
OUTSIDE = re.compile(r"<!-- (?:study: [\w-]+ [\w-]+|outside the study) -->.*?<!-- end -->", re.DOTALL)
NUMBER = re.compile(r"([+−-]?\d+\.\d+) ± (\d+\.\d+)")


def shown(stats: SeedStats, digits: int, signed: bool = False) -> str:
    """``51.8 ± 0.4``; without ± where there is one seed."""
    if not stats.count:
        return "–"
    mean = f"{stats.mean:{'+' if signed else ''}.{digits}f}".replace("-", "−")
    return mean if stats.half_width is None else f"{mean} ± {stats.half_width:.{digits}f}"


def tables() -> dict[tuple[str, str], ResultTable]:
    """By experiment and data set, the one with most steps where there are several."""
    found: dict[tuple[str, str], ResultTable] = {}
    for result in load_results(Study(STUDY)):
        for table in result.tables:
            key = (result.name, table.data)
            if key not in found or most_steps(table) > most_steps(found[key]):
                found[key] = table
    return found


def most_steps(table: ResultTable) -> int:
    return max((row.steps for row in table.rows), default=0)


def markdown(table: ResultTable) -> str:
    """Measured rows by their linear score, the baselines last."""
    compared = any(row.reference for row in table.method_rows)
    paper = table.has_paper
    heads = ["", "linear", *(["Δ"] if compared else []), "kNN", *(["Δ"] if compared else [])]
    heads += [*(["paper, linear"] if paper else []), "seeds"]
    lines = [heads, ["---"] * len(heads)]
    measured = [row for row in table.rows if row.score("linear").count]
    for row in sorted(measured, key=lambda row: (row.is_baseline, -_mean(row))):
        cells = [row.title]
        for score in ("linear", "knn"):
            cells.append(shown(row.score(score), 1))
            if compared:
                difference = row.difference(score)
                cells.append(shown(difference, 1, signed=True) if difference.count else "")
        if paper:
            cells.append(f"{row.paper[0]:.1f}" if row.paper else "")
        lines.append([*cells, str(row.score("linear").count)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _mean(row: ResultRow) -> float:
    return row.score("linear").mean


def numbers() -> set[str]:
    """Every score, and every difference of two rows of a table, with its interval, as pages may print it."""
    found = set()
    for table in (table for result in load_results(Study(STUDY)) for table in result.tables):
        for row in table.rows:
            for stats in row.scores.values():
                found |= {shown(stats, digits) for digits in (1, 2)}
        for one, other in itertools.permutations(table.rows, 2):
            for key in one.scores.keys() & other.scores.keys():
                difference = one.scores[key].minus(other.scores[key])
                found |= {shown(difference, digits, signed) for digits in (1, 2) for signed in (True, False)}
    return found


def published(text: str, known: dict[tuple[str, str], ResultTable]) -> str:
    """The page with its tables written anew."""
    return MARKED.sub(lambda m: f"{m[1]}{markdown(known[m[2], m[3]])}\n{m[4]}", text)


def unknown_numbers(text: str, known: set[str]) -> Iterator[str]:
    """What stands in a page as `mean ± half` and is no number of the study."""
    for mean, half in NUMBER.findall(text):
        if f"{mean.replace('-', '−')} ± {half}" not in known:
            yield f"{mean} ± {half}"


def scores_of_methods() -> dict[str, set[str]]:
    """By method every score of it in the study, rounded: as it is, and with a part or its views changed."""
    results = load_results(Study(STUDY))
    found: dict[str, set[str]] = {}
    for table in (table for result in results for table in result.tables):
        for row in table.method_rows:
            means = {f"{stats.mean:.1f}" for (_, top), stats in row.scores.items() if stats.count and top == "top1"}
            found.setdefault(row.title.partition(",")[0], set()).update(means)
    tables = [table for result in results if result.name in RANKINGS for table in result.tables]
    methods = {row.title.partition(",")[0] for table in tables for row in table.method_rows}
    return {title: found[title] for title in sorted(methods, key=len, reverse=True)}


def unknown_scores(text: str, known: Mapping[str, set[str]]) -> Iterator[str]:
    """What is said to be a score of a method, and is none in the study."""
    names = "|".join(map(re.escape, known))
    said = rf"(?<!\w)({names})\**(?:'s| has| at| is at)?\s+\**(\d\d\.\d)(?!\d| ±)"
    for method, score in re.findall(said, OUTSIDE.sub("", text)):
        if score not in known[method]:
            yield f"{method} {score}"


def main(check: bool) -> int:
    load_plugins(map(str, PLUGINS))
    known_tables, known_numbers, known_scores, wrong = tables(), numbers(), scores_of_methods(), 0
    for page in PAGES:
        text = page.read_text()
        new = published(text, known_tables)
        if not check and new != text:
            page.write_text(new)
        if check and new != text:
            print(f"{page.name}: its tables are not those of the study: run python study/publish.py")
            wrong += 1
        for said in unknown_scores(new, known_scores):
            print(f"{page.name}: {said} is no score of the study")
            wrong += 1
        for number in unknown_numbers(new, known_numbers):
            print(f"{page.name}: {number} is no number of the study")
            wrong += 1
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main("--check" in sys.argv[1:]))
