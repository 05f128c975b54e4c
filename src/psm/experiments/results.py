"""The files of a study: a JSON record per run, and CSV files made from all records, both with checksums.

    plan.csv       which run belongs to which row of which experiment
    results.csv    a row per score, with every setting
    curves.csv     a row per epoch of each run
    gradients.csv  a row per rank (figure 2)
    failures.csv   runs that failed and have not succeeded since

Reports read these five files only. Every file is replaced atomically.
"""

import csv
import io
import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from psm.config.schema import MAY_CHANGE
from psm.experiments.plan import PlanEntry, PlannedRun, data_name
from psm.utils.checksums import FIELD, Damaged, seal, unseal
from psm.utils.errors import UserError
from psm.utils.files import write_text_atomically

log = logging.getLogger("psm")

Row = dict[str, Any]
_CONTROL = frozenset(map(chr, range(32))) - {"\t", "\n", "\r"}
RUN_COLUMNS = ("run", "title", "method", "data", "seed", "evaluation_hash")
RECORD_FIELDS = {*RUN_COLUMNS, "scores", "evaluation", "config"}
DATA_COLUMNS = ("epochs", "batch_size", "encoder", "images", "test_images", "classes", "seconds", "date", "commit")
MACHINE_COLUMNS = ("psm", "torch", "threads", "hardware")
GRADIENT_COLUMNS = (  # needed to draw figure 2
    "similarity",
    *(
        f"{loss}_{factor}_{statistic}"
        for loss in ("binary", "softmax")
        for factor in ("slope", "length")
        for statistic in ("mean", "variance")
    ),
    *("same_class", "own_image", "positive_rank", "positive_rank_median"),
)


@dataclass(frozen=True)
class Study:
    """Paths of a study's folder."""

    folder: Path

    @property
    def marker(self) -> Path:
        """Marks the folder as a study's; a suite that works in the folder locks this file."""
        return self.folder / ".psm-study"

    def run(self, name: str) -> Path:
        return self.folder / "runs" / name

    def log(self, name: str) -> Path:
        return self.folder / "logs" / f"{name}.txt"

    def record(self, name: str, evaluation_hash: str) -> Path:
        return self.folder / "records" / f"{name}.{evaluation_hash}.json"

    def lock(self, name: str) -> Path:
        return self.folder / "locks" / name

    def job(self, name: str) -> Path:
        """What a run's worker process is told to do."""
        return self.folder / "jobs" / f"{name}.json"

    def csv(self, name: str) -> Path:
        return self.folder / f"{name}.csv"

    @property
    def report(self) -> Path:
        return self.folder / "report"


def read_record(path: Path) -> dict[str, Any] | None:
    """A run's record, or None where there is none that can be read; of a damaged one a warning says so."""
    try:
        content = json.loads(path.read_text())
        record = unseal(content) if isinstance(content, dict) else {}
    except OSError:
        return None
    except (ValueError, RecursionError):
        record = {}
    if not record.keys() >= RECORD_FIELDS or not _makes_rows(record):
        _warn_of_damage(path)
        return None
    return record


@cache
def _warn_of_damage(path: Path) -> None:
    """Once in a process: records are read several times."""
    log.warning("%s is damaged and counts as missing: its run is scored once more.", path)


def write_record(path: Path, record: Mapping[str, Any]) -> None:
    """Replace a run's record."""
    write_text_atomically(path, json.dumps(seal(record), indent=1) + "\n")


def is_finished(study: Study, run: PlannedRun) -> bool:
    """True if the scores of a run, and its gradients if wanted, are recorded."""
    record = read_record(study.record(run.name, run.evaluation_hash))
    return record is not None and (not run.gradients or has_gradients(record))


def has_gradients(record: Mapping[str, Any]) -> bool:
    """True if a record has all columns that figure 2 is drawn from."""
    ranks: Sequence[Row] = record.get("gradients") or ()
    return bool(ranks) and set(GRADIENT_COLUMNS) <= ranks[0].keys()


def has_baselines(study: Study, run: PlannedRun) -> bool:
    """True if the baselines of a run's data set and seed are recorded."""
    return read_record(study.record(run.baselines, run.evaluation_hash)) is not None


def add_entries(study: Study, entries: Iterable[PlanEntry]) -> None:
    """Add entries to plan.csv; an earlier entry of the same row, protocol and seed is replaced where it stands."""
    names = ("experiment", "data", "protocol", "title", "seed")
    rows: dict[tuple[str, ...], Row] = {
        tuple(str(row.get(name)) for name in names): dict(row) for row in read_csv(study.csv("plan"))
    }
    for entry in entries:
        row = asdict(entry)
        rows[tuple(str(row[name]) for name in names)] = row
    write_csv(study.csv("plan"), list(rows.values()))


def collect_records(study: Study) -> None:
    """Write the CSV files from all records; rows of runs whose record is gone are kept."""
    found = (read_record(path) for path in sorted((study.folder / "records").glob("*.json")))
    records = sorted((r for r in found if r is not None), key=lambda record: str(record.get("date", "")))
    known = {(record["run"], record["evaluation_hash"]) for record in records}
    for name, rows_of in (("results", _score_rows), ("curves", _curve_rows), ("gradients", _gradient_rows)):
        fresh = [row for record in records for row in rows_of(record)]
        runs = known | {(row["run"], row["evaluation_hash"]) for row in fresh}
        kept = [row for row in read_csv(study.csv(name)) if (row.get("run"), row.get("evaluation_hash")) not in runs]
        if fresh or kept:
            write_csv(study.csv(name), [*kept, *fresh])


def _makes_rows(record: Mapping[str, Any]) -> bool:
    """True if a record is made as psm makes it; one that was written or edited by hand may carry no checksum."""
    try:
        for rows_of in (_score_rows, _curve_rows, _gradient_rows):
            rows_of(record)
        hash((record["run"], record["evaluation_hash"]))
    except (KeyError, TypeError, ValueError, AttributeError):
        return False
    return True


def _run_columns(record: Mapping[str, Any]) -> Row:
    return {name: record[name] for name in RUN_COLUMNS} | {"data": data_name(record["data"])}


def _score_rows(record: Mapping[str, Any]) -> list[Row]:
    return [_score_row(record, score) for score in record["scores"]]


def _score_row(record: Mapping[str, Any], score: Mapping[str, Any]) -> Row:
    """A score with the settings of its run; that of a baseline is named by the baseline."""
    row = _run_columns(record)
    if not record["method"]:
        row |= {"run": f"{record['run']}/{score['of']}", "title": score["of"]}
    row |= {"score": score["score"]} | {name: round(score[name], 4) for name in ("top1", "top5")}
    intervals = {name: score.get(f"{name}_interval") or ("", "") for name in ("top1", "top5")}
    for name, ends in intervals.items():  # of the test images; empty in records of before there were intervals
        row |= {f"{name}_{side}": x if x == "" else round(x, 4) for side, x in zip(("low", "high"), ends, strict=True)}
    row |= {name: record.get(name) for name in (*DATA_COLUMNS, *MACHINE_COLUMNS)}
    settings = record["evaluation"] | {k: v for k, v in record["config"].items() if k not in MAY_CHANGE}
    used = score.get("protocol", {})
    names = {"knn": ("k", "temperature"), "linear": ("lr", "lr_grid", "held_out_top1")}.get(score["score"], ())
    settings |= {f"{score['score']}.{name}": used[name] for name in names if name in used}
    return row | {name: value for name, value in settings.items() if name not in row}


def _curve_rows(record: Mapping[str, Any]) -> list[Row]:
    return [_run_columns(record) | epoch for epoch in record.get("curves", ())]


def _gradient_rows(record: Mapping[str, Any]) -> list[Row]:
    return [_run_columns(record) | rank for rank in record.get("gradients") or ()]


def read_csv(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV file, every value as text and without the checksum; none where there is no file."""
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8", errors="replace") as file:
        reader = csv.DictReader(file)
        try:
            return [_checked(unseal(row)) for row in reader]
        except (Damaged, csv.Error):
            raise UserError(
                f"{path} is damaged: line {reader.line_num} differs from its checksum, or is no row of it. Restore the "
                "file, or remove the line; what has a record is written again by the next `psm experiment run`. If you "
                f"edited the line, empty its column {FIELD}."
            ) from None


def _checked(row: dict[str, str]) -> dict[str, str]:
    """The row; ``Damaged`` if it has more or fewer values than columns, or characters that no text has."""
    if None in row or not all(isinstance(value, str) and _CONTROL.isdisjoint(value) for value in row.values()):
        raise Damaged
    return row


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]], sealed: bool = True) -> None:
    """Replace a CSV file; its columns are the union of the rows' keys, in order of first occurrence.

    Args:
        path: of the file.
        rows: values by column.
        sealed: add a column with a checksum of each row, for a file that ``read_csv`` reads.
    """
    columns = list(dict.fromkeys(name for row in rows for name in row))
    texts: Iterable[Row] = ({name: _text(row.get(name)) for name in columns} for row in rows)
    stream = io.StringIO(newline="")
    writer = csv.DictWriter(stream, [*columns, FIELD] if sealed else columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(map(seal, texts) if sealed else texts)
    write_text_atomically(path, stream.getvalue())


def _text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    return json.dumps(value) if isinstance(value, (list, dict)) else str(value)
