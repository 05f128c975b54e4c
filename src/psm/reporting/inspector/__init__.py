"""The mining inspector: an HTML page that shows the positives and negatives mined for each query."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from psm.config import merge as settings
from psm.config.keys import show
from psm.config.schema import InspectConfig, ResolvedPretrainConfig
from psm.config.stored import load_run_config
from psm.data import ImageDataset, load_dataset
from psm.data.holdout import hold_out
from psm.data.same_images import image_difference
from psm.data.stats import channel_statistics
from psm.methods.plugins import load_plugins
from psm.reporting.inspector.collect import InspectionData, choose, collect
from psm.reporting.inspector.page import render
from psm.utils.checkpoint_file import read_checkpoint
from psm.utils.errors import UserError
from psm.utils.files import output_file, write_text_atomically
from psm.utils.progress import counting
from psm.utils.resources import resources_explained, write_error
from psm.utils.run_folder import RunFolder

MEMORY_ADVICE = "give fewer queries= or others=, or, to keep the images on disk, a smaller images.memory"


@dataclass(frozen=True)
class Inspection:
    """The page that was written, its data, and remarks for the user."""

    page: Path
    data: InspectionData
    remarks: list[str]


def inspect(
    run: str | Path,
    data: str | Path | Sequence[str | Path] | ImageDataset | None = None,
    encoder: nn.Module | None = None,
    **keys: Any,
) -> Inspection:
    """Write a page that shows the samples that a run mined.

    Examples:
        >>> psm.inspect("runs/a", queries=100).page  # doctest: +SKIP

    Args:
        run: run folder.
        data: name or folder of the run's images, or a loaded data set; by default the data of the run.
        encoder: receives the weights where the run was given a module instead of a name.
        keys: those of `psm inspect`, nested ones as dictionaries.
    """
    given = {**keys, "run": str(run)}
    if isinstance(data, (str, Path)):
        given["data"] = str(data)
    elif isinstance(data, (list, tuple)):
        given["data"] = [str(source) for source in data]
    return run_inspection(given, data=data if isinstance(data, ImageDataset) else None, encoder=encoder)


@resources_explained(MEMORY_ADVICE)
def run_inspection(
    *overrides: Mapping[str, Any], data: ImageDataset | None = None, encoder: nn.Module | None = None
) -> Inspection:
    """Inspect by the merged overrides; a given ``data`` replaces the one that its key names."""
    first = settings.build(InspectConfig, *overrides)
    load_plugins(first.plugins)
    run = _find_run(first.run)
    page = output_file(first.out, run.inspection, first.overwrite)
    checkpoint = read_checkpoint(run.checkpoint)
    trained = load_run_config(checkpoint)
    if trained.encoder == "custom" and encoder is None:
        raise UserError(
            f"run={run.folder} trained an encoder given as a module, which cannot be rebuilt from it: call psm.inspect "
            "from Python with that module as encoder=."
        )
    config = settings.build(InspectConfig, *overrides, base=InspectConfig(images=trained.images))
    if data is None:
        data = load_dataset(config.data or trained.data, config.images, config.progress)
    else:
        data = hold_out(data, config.images.holdout)
    _check_images(run, checkpoint["psm"], data, show(config.data or trained.data))
    queries = choose(data.train, config.queries, config.seed, "inspected queries")
    others = choose(data.train, config.others, config.seed, "inspected others")
    checkpoints = [*run.snapshots, run.checkpoint]
    done = 0
    with counting("mining", len(checkpoints) * (len(queries) + len(others)), config.progress) as update:

        def advance(count: int) -> None:
            nonlocal done
            done += count
            update(done)

        collected = collect(checkpoints, data.train, queries, others, config.negatives, encoder, advance)
    content = render(collected, data, trained, run.folder.resolve().name)
    try:
        write_text_atomically(page, content)
    except OSError as error:
        raise write_error(f"out={page}", error) from None
    return Inspection(page, collected, _remarks(collected, trained))


def _remarks(collected: InspectionData, trained: ResolvedPretrainConfig) -> list[str]:
    remarks = []
    if not collected.method.num_mined:
        remarks.append(f"{trained.method} mines no positives: the page shows the nearest images that could be mined.")
    if len(collected.epochs) == 1:
        remarks.append("one epoch to look at: train with save.snapshots=5 to keep a checkpoint every five epochs.")
    return remarks


def _find_run(given: str) -> RunFolder:
    if not given:
        raise UserError("run= is missing: give a run folder, for example psm inspect runs/a.")
    run = RunFolder(Path(given).expanduser())
    if not run.folder.is_dir():
        kind = "is a file" if run.folder.exists() else "does not exist"
        raise UserError(f"run={given} {kind}: give the folder that psm pretrain wrote, its out=.")
    if not run.checkpoint.exists():
        problem = "has no checkpoint yet: wait for its first epoch" if run.config.exists() else "is not a run folder"
        raise UserError(f"run={given} {problem}; checkpoints/{run.checkpoint.name} is looked for.")
    return run


def _check_images(run: RunFolder, about: dict[str, Any], data: ImageDataset, name: str) -> None:
    """Refuse other images than the run's, by their number and channel means: the bank stores images by index."""
    mean, _ = channel_statistics(data.train)
    difference = image_difference(about, len(data.train), mean, data.train.names_checksum)
    if difference is not None:
        raise UserError(
            f"data={name} does not hold the images that the run in {run.folder} was trained on: {difference}; restore "
            "them, or say with data= and images.* where they are now."
        )
