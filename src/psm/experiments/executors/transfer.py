"""Files of a run on their way between the study's folder and a machine that does not share it.

A copy is cut off when a machine is lost. Whatever has arrived must be something to go on from, so files are read in one
order and written in the other: a record is read before the encoder that it is about, an encoder before the checkpoint
of its epoch, a checkpoint before the metrics up to it. What came first is then never older than what it rests on.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path

from psm.experiments.job import Job
from psm.utils.files import TEMPORARY_PREFIX, write_atomically
from psm.utils.run_folder import RunFolder

Files = dict[str, bytes]  # by path within the study
Stamps = dict[str, tuple[int, int]]  # time and size of files that are known to the other side


def files_to_resume(job: Job) -> Files:
    """What a machine needs to continue a run: its last checkpoint and what lies beside it."""
    run = RunFolder(job.study.run(job.name))
    left_out = {run.folder / "logs", run.exports, *run.snapshots}
    paths = [path for path in _paths(job) if not left_out & {path, *path.parents}]
    return {str(path.relative_to(job.study.folder)): path.read_bytes() for path in paths}


def changed_files(job: Job, known: Stamps, weights: bool, records: bool) -> Files:
    """Files that are new since the last call, which are then known.

    Args:
        job: in the folder where it is worked on.
        known: updated in place.
        weights: with checkpoints and encoder, which are large.
        records: with records, which come last.
    """
    found: Files = {}
    for path in _paths(job):
        name = str(path.relative_to(job.study.folder))
        if (_is_weights(path) and not weights) or (path.parent.name == "records" and not records):
            continue
        try:
            with path.open("rb") as file:
                state = path.stat()
                stamp = (state.st_mtime_ns, state.st_size)
                if known.get(name) != stamp:
                    found[name] = file.read()
                    known[name] = stamp
        except FileNotFoundError:  # replaced or removed meanwhile
            continue
    return found


def write_files(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write files below a folder, each atomically, those last that rest on the others."""
    for name, content in sorted(files.items(), key=lambda item: -_rank(Path(item[0]))):
        write_atomically(folder / name, lambda file, content=content: file.write(content))  # type: ignore[misc]


def _paths(job: Job) -> list[Path]:
    """The files of a run, in the order in which they are read."""
    return sorted(_unordered(job), key=lambda path: (_rank(path), path))


def _unordered(job: Job) -> Iterator[Path]:
    for name in (job.run.name, job.run.baselines):
        record = job.study.record(name, job.run.evaluation_hash)
        if record.exists():
            yield record
    for path in job.study.run(job.name).rglob("*"):
        if path.is_file() and not path.name.startswith(TEMPORARY_PREFIX):
            yield path


def _is_weights(path: Path) -> bool:
    return path.suffix in (".ckpt", ".safetensors") or path.name == "encoder.json"


def _rank(path: Path) -> int:
    if path.parent.name == "records":
        return 0
    if path.suffix == ".ckpt":
        return 2
    return 1 if _is_weights(path) else 3
