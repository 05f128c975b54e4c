"""What a study says first: how PSM and its successor stand among the methods, in two sentences."""

from collections.abc import Sequence

from psm.experiments.aggregate import ExperimentResult, ResultRow, ResultTable, format_stats

METHOD, SUCCESSOR = "PSM", "PSM v2"
MORE_VIEWS = f"{SUCCESSOR}, 4 views"
CONTROL = "HCL, 4 views"  # whether it is the views or PSM v2
NO_ROWS = f"{MORE_VIEWS}, no mined rows"  # whether it is the mined positives
BESIDE_THE_PAPER = (SUCCESSOR, MORE_VIEWS, CONTROL, NO_ROWS)
RANKINGS = ("table1", "successor")  # experiments whose rows are methods as they are


def answer(results: Sequence[ExperimentResult]) -> list[str]:
    """At most two sentences, from the longest schedule that PSM was measured with; none without such runs."""
    tables = [
        table
        for result in results
        if result.name in RANKINGS
        for table in result.tables
        if (row := table.row(METHOD)) and row.score(table.main_score).count
    ]
    if not tables:
        return []
    longest = max(tables, key=lambda table: (_steps(table), table.runs))
    same = [table for table in tables if (table.data, table.protocol) == (longest.data, longest.protocol)]
    rows = {row.title: row for table in same for row in _methods(table)}
    return [_place(rows, longest), *_successor(rows, longest)]


def _steps(table: ResultTable) -> int:
    """The steps of PSM's runs; rows with more views may have others."""
    row = table.row(METHOD)
    return row.steps if row else 0


def _methods(table: ResultTable) -> list[ResultRow]:
    """Rows of the paper's methods and of PSM v2, without those that change a part of one."""
    changed = (f"{SUCCESSOR} ", f"{SUCCESSOR},", "HCL,")
    return [
        row
        for row in table.method_rows
        if row.score(table.main_score).count and (row.title in BESIDE_THE_PAPER or not row.title.startswith(changed))
    ]


def _place(rows: dict[str, ResultRow], table: ResultTable) -> str:
    """Where PSM stands among the methods of the paper's comparison."""
    score = table.main_score
    ordered = sorted(_of_the_paper(rows), key=lambda row: -row.score(score).mean)
    psm, best = rows[METHOD], ordered[0]
    seeds = ", with one seed" if psm.score(score).count == 1 else ""
    where = f"on {table.title} after {_steps(table):,} steps{seeds}, by a {_words(score)}"
    value = f"{format_stats(psm.score(score))} %"
    if psm is best:
        second = f"; {ordered[1].title} has {format_stats(ordered[1].score(score))} %" if ordered[1:] else ""
        return f"PSM is the first of {len(ordered)} methods {where}, with {value}{second}."
    ahead = f"{best.title} leads with {format_stats(best.score(score))} %"
    return f"PSM is number {ordered.index(psm) + 1} of {len(ordered)} methods {where}, with {value}; {ahead}."


def _of_the_paper(rows: dict[str, ResultRow]) -> list[ResultRow]:
    return [row for row in rows.values() if row.title not in BESIDE_THE_PAPER]


def _successor(rows: dict[str, ResultRow], table: ResultTable) -> list[str]:
    """How far PSM v2 is from the best of the others, seed by seed: as it is, and with four views."""
    score = table.main_score
    best = max(_of_the_paper(rows), key=lambda row: row.score(score).mean)
    words = {
        SUCCESSOR: "PSM v2, which this project makes of it, has",
        MORE_VIEWS: "with four views of each image, in twice the computation, it has"
        if SUCCESSOR in rows
        else "PSM v2, which this project makes of it, with four views of each image, in twice the computation, has",
    }
    parts = [f"{text} {_beside(rows[title], best, score)}" for title, text in words.items() if title in rows]
    if MORE_VIEWS in rows:
        controls = {NO_ROWS: "without its mined positives it has", CONTROL: "HCL with as many views has"}
        found = [(text, rows[title]) for title, text in controls.items() if title in rows]
        parts += [f"{text} {format_stats(row.score(score))} %" for text, row in found]
    return [f"{'; '.join(parts)}."] if parts else []


def _beside(row: ResultRow, best: ResultRow, score: str) -> str:
    """A row's score and its distance from the best, with what the seeds say of it."""
    difference = row.score(score).minus(best.score(score))
    text = f"{format_stats(row.score(score))} %"
    if not difference.count:
        return text
    meaning = (
        "of a single seed"
        if difference.count == 1
        else f"clear of zero over {difference.count} seeds"
        if difference.is_clear
        else f"within the spread of {difference.count} seeds"
    )
    return f"{text}, {format_stats(difference, signed=True)} points from {best.title}, {meaning}"


def _words(score: str) -> str:
    return "linear layer" if score == "linear" else "nearest-neighbor vote"
