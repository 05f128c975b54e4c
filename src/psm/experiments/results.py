"""The files of a study: a record for each run, and from all of them the tables that pandas reads in one line.

    plan.csv       which run belongs to which row of which experiment
    results.csv    a row for each score, with every setting
    curves.csv     a row for each epoch of each run
    gradients.csv  a row for each rank (figure 2)
    failures.csv   runs that failed and have not succeeded since

Reports read these five and nothing else. Every file is replaced whole, so that a kill leaves no half of one.
"""

import csv
import io
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from psm.config.schema import MAY_CHANGE
from psm.experiments.plan import Place, PlannedRun, data_name
from psm.utils.files import write_text_atomically

Row = dict[str, Any]
ABOUT = ("run", "title", "method", "data", "seed")
GRADIENTS = (  # what figure 2 is drawn from
    "similarity",
    *(
        f"{loss}_{factor}_{moment}"
        for loss in ("binary", "softmax")
        for factor in ("slope", "length")
        for moment in ("mean", "variance")
    ),
    *("same_class", "own_image", "positive_rank", "positive_rank_median"),
)


@dataclass(frozen=True)
class Study:
    """Paths of a study's folder."""

    folder: Path

    @property
    def marker(self) -> Path:
        """Says that the folder is a study's, and is what a suite that works in it locks."""
        return self.folder / ".psm-study"

    def run(self, name: str) -> Path:
        return self.folder / "runs" / name

    def log(self, name: str) -> Path:
        return self.folder / "logs" / f"{name}.txt"

    def record(self, name: str, evaluated: str) -> Path:
        return self.folder / "records" / f"{name}.{evaluated}.json"

    def lock(self, name: str) -> Path:
        return self.folder / "locks" / name

    def table(self, name: str) -> Path:
        return self.folder / f"{name}.csv"

    @property
    def report(self) -> Path:
        return self.folder / "report"


def read_record(path: Path) -> dict[str, Any] | None:
    """A run's record, or None where there is none that can be read."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) and "run" in content else None


def write_record(path: Path, record: Mapping[str, Any]) -> None:
    write_text_atomically(path, json.dumps(record, indent=1) + "\n")


def finished(study: Study, run: PlannedRun) -> bool:
    """Whether all that is wanted of a run is recorded."""
    record = read_record(study.record(run.run, run.evaluated))
    return record is not None and (not run.gradients or has_gradients(record))


def has_gradients(record: Mapping[str, Any]) -> bool:
    """Whether the gradients of figure 2 are recorded, and all that it is drawn from."""
    ranks = record.get("gradients")
    return bool(ranks) and set(GRADIENTS) <= ranks[0].keys()


def has_baselines(study: Study, run: PlannedRun) -> bool:
    return read_record(study.record(run.baseline, run.evaluated)) is not None


def add_places(study: Study, places: Iterable[Place]) -> None:
    """Note where runs belong. A row that was planned before under the same protocol is replaced, others stay."""
    names = ("experiment", "data", "protocol", "title", "seed")
    rows = {tuple(str(row.get(name)) for name in names): row for row in read_table(study.table("plan"))}
    for place in places:
        row = asdict(place)
        rows.pop(key := tuple(str(row[name]) for name in names), None)
        rows[key] = row
    write_table(study.table("plan"), list(rows.values()))


def collect(study: Study) -> None:
    """Write the tables anew from all records; rows of runs whose record is gone stay as they are."""
    records = [read_record(path) for path in sorted((study.folder / "records").glob("*.json"))]
    records = sorted((r for r in records if r), key=lambda record: str(record.get("date", "")))
    known = {(record["run"], record["evaluated"]) for record in records}
    for name, rows_of in (("results", _scores), ("curves", _curves), ("gradients", _gradients)):
        fresh = [row for record in records for row in rows_of(record)]
        runs = known | {(row["run"], row["evaluated"]) for row in fresh}
        kept = [row for row in read_table(study.table(name)) if (row.get("run"), row.get("evaluated")) not in runs]
        if fresh or kept:
            write_table(study.table(name), [*kept, *fresh])


def _about(record: Mapping[str, Any]) -> Row:
    return {name: record[name] for name in (*ABOUT, "evaluated")} | {"data": data_name(record["data"])}


def _scores(record: Mapping[str, Any]) -> list[Row]:
    facts = ("epochs", "batch_size", "encoder", "images", "test_images", "classes", "seconds", "date", "commit")
    machine = ("psm", "torch", "threads", "hardware")
    rows = []
    for score in record["scores"]:
        about = _about(record) | {"run": record["run"] if record["method"] else f"{record['run']}/{score['of']}"}
        about |= {} if record["method"] else {"title": score["of"]}
        measured = {"score": score["score"]} | {name: round(score[name], 4) for name in ("top1", "top5")}
        rest = {name: record.get(name) for name in (*facts, *machine)}
        settings = record["evaluation"] | {k: v for k, v in record["config"].items() if k not in MAY_CHANGE}
        told = about | measured | rest
        rows.append(told | {name: value for name, value in settings.items() if name not in told})
    return rows


def _curves(record: Mapping[str, Any]) -> list[Row]:
    return [_about(record) | epoch for epoch in record.get("curves", ())]


def _gradients(record: Mapping[str, Any]) -> list[Row]:
    return [_about(record) | rank for rank in record.get("gradients") or ()]


def read_table(path: Path) -> list[dict[str, str]]:
    """The rows of a table, every value as text; none where there is no table."""
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def write_table(path: Path, rows: list[Mapping[str, Any]]) -> None:
    """A table with all columns that occur, in the order in which they first do."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    stream = io.StringIO(newline="")
    writer = csv.DictWriter(stream, columns, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: _text(value) for name, value in row.items()} for row in rows)
    write_text_atomically(path, stream.getvalue())


def _text(value: Any) -> Any:
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    return json.dumps(value) if isinstance(value, (list, dict)) else value
