"""What a study says first: how PSM and its successor stand among the methods, in two sentences."""

from collections.abc import Sequence

from psm.experiments.aggregate import ExperimentResult, ResultRow, ResultTable, format_stats

METHOD, SUCCESSOR = "PSM", "PSM v2"
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
    return max(row.steps for row in table.method_rows)


def _methods(table: ResultTable) -> list[ResultRow]:
    """Rows of methods as they are, without those that change a part of PSM v2."""
    return [
        row
        for row in table.method_rows
        if row.score(table.main_score).count and (row.title == SUCCESSOR or not row.title.startswith(SUCCESSOR))
    ]


def _place(rows: dict[str, ResultRow], table: ResultTable) -> str:
    """Where PSM stands among the methods of the paper's comparison."""
    score = table.main_score
    ordered = sorted((row for row in rows.values() if row.title != SUCCESSOR), key=lambda row: -row.score(score).mean)
    psm, best = rows[METHOD], ordered[0]
    where = f"on {table.title} after {_steps(table):,} steps, by a {_words(score)}"
    value = f"{format_stats(psm.score(score))} %"
    if psm is best:
        second = f"; {ordered[1].title} has {format_stats(ordered[1].score(score))} %" if ordered[1:] else ""
        return f"PSM is the first of {len(ordered)} methods {where}, with {value}{second}."
    ahead = f"{best.title} leads with {format_stats(best.score(score))} %"
    return f"PSM is number {ordered.index(psm) + 1} of {len(ordered)} methods {where}, with {value}; {ahead}."


def _successor(rows: dict[str, ResultRow], table: ResultTable) -> list[str]:
    """How far PSM v2 is from the best of the others, seed by seed."""
    score, successor = table.main_score, rows.get(SUCCESSOR)
    others = [row for row in rows.values() if row.title != SUCCESSOR]
    if successor is None:
        return []
    best = max(others, key=lambda row: row.score(score).mean)
    difference = successor.score(score).minus(best.score(score))
    text = f"PSM v2, which this project makes of it, has {format_stats(successor.score(score))} %"
    if difference.count:
        meaning = (
            "of a single seed"
            if difference.count == 1
            else f"clear of zero over {difference.count} seeds"
            if difference.is_clear
            else f"within the spread of {difference.count} seeds"
        )
        text += f", {format_stats(difference, signed=True)} points from {best.title}, {meaning}"
    return [f"{text}."]


def _words(score: str) -> str:
    return "linear layer" if score == "linear" else "nearest-neighbor vote"
