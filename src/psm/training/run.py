"""A training run, whatever it trains: hold the run folder, start or resume, train, finish."""

import gc
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

import lightning
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn

from psm.config import merge as settings
from psm.config.keys import show
from psm.config.run_settings import RunSettings
from psm.config.schema import MAY_CHANGE
from psm.config.stored import save_run_config, stored_config
from psm.data import ImageDataset
from psm.data.location import absolute_data, absolute_images
from psm.data.same_images import image_difference
from psm.models.factory import prefers_channels_last
from psm.training.callbacks import CheckpointCallback, MetricsCallback, metric_names
from psm.training.distributed import is_rank_zero, join
from psm.training.exchange import Exchange, handed_down, inherited
from psm.training.launch import Launch, find_launch
from psm.training.measures import Measures
from psm.training.preemption import PreemptionCallback
from psm.training.progress_bar import ProgressBar
from psm.training.run_module import RunModule
from psm.training.trainer import make_trainer, quiet
from psm.training.user_callbacks import check_callbacks, load_callbacks
from psm.utils.checkpoint_file import read_checkpoint
from psm.utils.errors import LostProcess, Preempted, UserError
from psm.utils.files import remove_temporary_files, write_atomically, write_text_atomically
from psm.utils.resources import resources_explained
from psm.utils.run_folder import RunFolder
from psm.utils.run_lock import clear_run, lock_run

log = logging.getLogger("psm")

WAIT = 1800  # seconds that processes wait for each other; Lightning's default for a process group

# How the backends of torch.distributed say that a process is gone.
LOST = re.compile(r"onnection (closed|reset|refused)|Broken pipe|gloo.*Timed out|NCCL|peer", re.IGNORECASE)

Module = TypeVar("Module", bound=RunModule)


class Training(Protocol):
    """What a command trains; `run_training` does the rest.

    A user's mistake is answered in ``configure``, ``load``, ``resolve`` and ``prepare``, before anything is written.
    """

    @property
    def command(self) -> str:
        """As it is typed, for example ``psm pretrain``."""

    @property
    def schema(self) -> type:
        """The configuration class of what a user gives."""

    @property
    def memory_advice(self) -> str:
        """What to do where memory runs out."""

    @property
    def given_data(self) -> bool:
        """True if the images come from Python, not from what a key names."""

    def begin(self, asked: Any) -> None:
        """Read what this call alone was given; the folder has not been looked at yet."""

    def stored(self, source: RunFolder | Mapping[str, Any]) -> Any:
        """The resolved configuration in a run folder or in the contents of a checkpoint."""

    def configure(
        self, run: RunFolder, asked: Any, overrides: Sequence[Mapping[str, Any]], stored: Any, point: Path | None
    ) -> Any:
        """The user's configuration, refused if no data could make it right.

        Args:
            run: the folder.
            asked: the merged overrides.
            overrides: what the user gave.
            stored: the configuration of the run that is resumed, or None.
            point: the checkpoint that it goes on from, or None.
        """

    def load(self, config: Any, progress: bool) -> ImageDataset:
        """The data of a run."""

    def trained_images(self, config: Any, data: ImageDataset) -> int:
        """How many images of the data are trained on."""

    def resolve(self, config: Any, data: ImageDataset) -> Any:
        """The settings of a run on this data."""

    def follow(self, run: RunFolder, config: Any, point: Path | None) -> None:
        """On ranks other than 0: get ready for what rank 0 has configured."""

    def prepare(
        self, run: RunFolder, config: Any, data: ImageDataset, launch: Launch, point: Path | None
    ) -> tuple[lightning.Trainer, Any]:
        """The trainer and the module."""

    def complete(self, begun: Any) -> dict[str, Any]:
        """The configuration that a run began with, with the values of settings that did not exist then."""

    def train_further(self, run: RunFolder) -> str:
        """How a finished run is trained further, as a sentence."""

    def describe(self, config: Any) -> str:
        """The first line of the log."""

    def announce(self, module: Any) -> None:
        """What is said when a new run begins."""

    def finish(self, run: RunFolder, trainer: lightning.Trainer, module: Any, data: ImageDataset) -> Any:
        """Write what the run leaves, and the result of the call."""


def run_training(training: Training, *overrides: Mapping[str, Any]) -> Any:
    """Train by the merged overrides, nested keys of which the later ones win."""
    asked: Any = settings.build(training.schema, *overrides)
    if not asked.out:
        raise UserError("out= is missing: name a folder for the run, for example out=runs/a.")
    run = RunFolder(Path(asked.out).expanduser())
    with resources_explained(training.memory_advice, lambda: _how_to_continue(run, training.command)):
        result = _run(training, run, asked, overrides)
    gc.collect()  # trainer and module refer to one another: Python alone would keep them for dozens of runs
    return result


def _how_to_continue(run: RunFolder, command: str) -> str:
    if not run.checkpoint.exists():
        return ""
    return f"The last checkpoint is intact: `{command} out={run.folder} resume=true` continues from it."


def _run(training: Training, run: RunFolder, asked: Any, overrides: Sequence[Mapping[str, Any]]) -> Any:
    training.begin(asked)
    handed = inherited()
    if handed is not None:  # Lightning has started this process from one that holds the folder
        join(int(os.environ["LOCAL_RANK"]) or 1)
        data, trainer, module = _follow(training, run, handed, Launch())
        return _fit(training, run, trainer, module, data, handed["resume"] is not None)
    launch = find_launch(asked)
    join(launch.rank)
    exchange = Exchange(launch, float(asked.ddp.get("timeout", WAIT)))
    if launch.rank > 0:
        decision = exchange.decision()
        with exchange.getting_ready():
            data, trainer, module = _follow(training, run, decision, launch)
        with handed_down(decision):
            return _fit(training, run, trainer, module, data, decision["resume"] is not None)
    with ExitStack() as stack:
        deciding = stack.enter_context(ExitStack())
        deciding.enter_context(exchange.deciding())
        stack.enter_context(lock_run(run, asked.resume, asked.overwrite))
        resuming = asked.resume != "false" and run.used
        point = run.resume_point(asked.resume) if resuming else None
        begun = _begun_with(training, run, point) if point else None
        stored = begun
        if resuming and run.config.exists():
            stored = stored_config(run, training.schema)
        user = training.configure(run, asked, overrides, stored, point)
        data = training.load(user, user.progress)
        if point is not None:
            _refuse_other_count(run, point, user.data, training.trained_images(user, data))
        if not training.given_data:
            user = replace(user, data=absolute_data(user.data), images=absolute_images(user.data, user.images))
        config = training.resolve(user, data)
        if stored:
            # The checkpoint has the configuration that the run began with, whatever config.yaml says by now.
            _refuse_changes(training, run, begun or stored, config)
        trainer, module = training.prepare(run, config, data, launch, point)
        decision = {
            "config": settings.to_dict(config),
            "resume": None if point is None else str(point),
            "images": module.data_description(),
        }
        exchange.decide(decision)
        if resuming:
            _continue_from(run, point, module)
        else:
            aside = stack.enter_context(clear_run(run, asked.overwrite))
        stack.enter_context(_logging(run, training.describe(config)))
        if not resuming and aside is not None:
            log.warning("the run that was in %s is now in %s", run.folder, aside)
        save_run_config(run, config)
        if point is None:
            training.announce(module)
        _report_unreadable(run, data)
        deciding.close()
        exchange.start()
        stack.enter_context(handed_down(decision))
        try:
            return _fit(training, run, trainer, module, data, point is not None)
        finally:  # images from shards are found to be unreadable when they are read
            if data.train.streamed is not None and data.train.streamed.unreadable:
                _report_unreadable(run, data)


def _follow(
    training: Training, run: RunFolder, decision: Mapping[str, Any], launch: Launch
) -> tuple[ImageDataset, lightning.Trainer, Any]:
    """Prepare what rank 0 has decided. Nothing is written."""
    config = training.stored({"psm": {"config": decision["config"]}})
    data = training.load(config, progress=False)
    point = None if decision["resume"] is None else Path(decision["resume"])
    training.follow(run, config, point)
    trainer, module = training.prepare(run, config, data, launch, point)
    difference = module.data_difference(decision["images"])
    if difference is not None:
        raise UserError(f"data={show(config.data)} is not the same here as on rank 0: {difference}.")
    return data, trainer, module


def assemble(
    run: RunFolder,
    config: RunSettings,
    measures: Measures[Any],
    launch: Launch,
    module: Callable[[lightning.Trainer], Module],
    callbacks: Sequence[lightning.Callback] = (),
    checkpoints: Sequence[lightning.Callback] = (),
    progress: bool = True,
    notes: Sequence[str] = (),
    command: str = "psm pretrain",
) -> tuple[lightning.Trainer, Module]:
    """The trainer of a run with psm's callbacks and the user's, and the module that it trains.

    Args:
        launch: how the processes of the run were started.
        module: makes the module once the trainer knows its devices.
        callbacks: the user's instances, beside those that the configuration names.
        checkpoints: save something before last.ckpt is saved.
        progress: show it.
        notes: lines for the plan that is shown before the first step.
        command: named where the user has to look up a key.
    """
    bar = ProgressBar(progress, notes=notes) if is_rank_zero() else None
    given = [*load_callbacks(config.callbacks), *callbacks]
    own = [MetricsCallback(run, measures, bar), *([bar] if bar else [])]
    # psm's metrics come before the user's callbacks, its checkpoints after them.
    checkpoint = CheckpointCallback(run)
    last = [*checkpoints, checkpoint, PreemptionCallback(checkpoint)]
    trainer = make_trainer(run, config, [*own, *given, *last], launch, command)
    if config.batch_size % trainer.world_size:
        raise UserError(
            f"batch_size={config.batch_size} is shared by {trainer.world_size} devices: give a multiple of that number."
        )
    made = module(trainer)
    check_callbacks(given, metric_names(made, measures), bool(trainer.loggers))
    return trainer, made


def use_channels_last(networks: nn.Module, wanted: bool | None, trainer: lightning.Trainer) -> bool:
    """Lay out the networks channels-last if that is wanted, or, left open, where it was measured to be faster."""
    channels_last = prefers_channels_last(trainer.strategy.root_device) if wanted is None else wanted
    if channels_last:
        networks.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return channels_last


def _report_unreadable(run: RunFolder, data: ImageDataset) -> None:
    if data.unreadable:
        log.warning("%d unreadable files are left out, see %s", len(data.unreadable), run.unreadable)
    found = (*data.unreadable, *(data.train.streamed.unreadable if data.train.streamed is not None else ()))
    if found:
        write_text_atomically(run.unreadable, "".join(f"{file}\t{reason}\n" for file, reason in found))


def _begun_with(training: Training, run: RunFolder, point: Path) -> Any:
    """The configuration in the checkpoint that a run is to continue from, or a sentence on what can be done."""
    try:
        checkpoint = read_checkpoint(point)
    except UserError as error:
        others = [snapshot.stem for snapshot in run.snapshots if snapshot != point]
        advice = (
            f"resume={others[-1]} continues from that snapshot (there are {', '.join(others)})."
            if others
            else "Nothing was changed: restore it, or name another out for a new run."
        )
        raise UserError(f"{error} {advice}") from None
    if point != run.checkpoint:
        _refuse_to_go_back(run, point, checkpoint["global_step"])
    return training.stored(checkpoint)


def _refuse_to_go_back(run: RunFolder, point: Path, step: int) -> None:
    """A snapshot stands in for a checkpoint that is lost or damaged, not for one that is further on."""
    try:
        last = read_checkpoint(run.checkpoint)["global_step"] if run.checkpoint.exists() else 0
    except UserError:
        return
    if last > step:
        raise UserError(
            f"resume={point.stem} is step {step}, and checkpoints/{run.checkpoint.name} of the run in {run.folder} is "
            f"step {last}: resume=true continues from there; to go back all the same, move that file away first."
        )


def _continue_from(run: RunFolder, point: Path | None, module: RunModule) -> None:
    """Make the folder ready for a run that goes on; what was written after its checkpoint will be written again."""
    step = 0
    remove_temporary_files(run.folder)
    if point is not None:
        _refuse_other_data(run, point, module)
        step = read_checkpoint(point)["global_step"]
        if point != run.checkpoint:
            write_atomically(run.checkpoint, lambda file: file.write(point.read_bytes()))
    run.truncate_metrics(step)


def _refuse_changes(training: Training, run: RunFolder, begun: Any, config: Any) -> None:
    """Refuse settings that differ from those of the run that is resumed."""
    before, now = (dict(settings.flatten(x)) for x in (training.complete(begun), settings.to_dict(config)))
    for dotted, value in now.items():
        # The images are compared themselves: they may lie elsewhere by now. A run from before presets has none.
        may_change = dotted in MAY_CHANGE or dotted.partition(".")[0] in MAY_CHANGE
        may_change |= dotted == "data" or (dotted == "preset" and before.get(dotted, "auto") == "auto")
        if dotted == "epochs" and before.get(dotted) != value and run.encoder.exists():
            raise UserError(
                f"epochs={value} does not continue the run in {run.folder}, which is finished: its learning rate fell "
                f"to zero over epochs={before.get(dotted)}. {training.train_further(run)}"
            )
        if not may_change and before.get(dotted) != value:
            raise UserError(
                f"{dotted}={value} differs from {dotted}={before.get(dotted)} of the run in {run.folder}: resume it "
                f"without {dotted}= (and with config.yaml as it was), or start another run in another out."
            )


def _refuse_other_data(run: RunFolder, point: Path, module: RunModule) -> None:
    """A run goes on with the images it began with."""
    _refuse_difference(run, module.config.data, module.data_difference(read_checkpoint(point)["psm"]))


def _refuse_other_count(run: RunFolder, point: Path, data: str | list[str], count: int) -> None:
    """Refuse another number of images before anything that follows from it differs too."""
    described = read_checkpoint(point)["psm"]
    _refuse_difference(run, data, image_difference(described, count, described["encoder_info"]["mean"]))


def _refuse_difference(run: RunFolder, data: str | list[str], difference: str | None) -> None:
    if difference is not None:
        raise UserError(
            f"data={show(data)} is not what the run in {run.folder} began with: {difference}; restore it, give with "
            "data= where those images are, or start another run in another out."
        )


def _fit(
    training: Training, run: RunFolder, trainer: lightning.Trainer, module: Any, data: ImageDataset, resuming: bool
) -> Any:
    finished = _why_finished(run, module) if resuming else ""
    if finished:
        log.warning("the run in %s %s: nothing is left to train.", run.folder, finished)
    else:
        _train(trainer, module, run.checkpoint if resuming else None)
    return training.finish(run, trainer, module, data)


def _why_finished(run: RunFolder, module: RunModule) -> str:
    """Why a run has nothing left to train, as the end of a sentence; empty for one that goes on."""
    checkpoint = read_checkpoint(run.checkpoint)
    if checkpoint["psm"].get("stopped_early"):
        return "was stopped early by a callback and counts as finished"
    epochs = module.config.epochs
    return f"is finished ({epochs} of {epochs} epochs)" if checkpoint["global_step"] >= module.total_steps else ""


def _train(trainer: lightning.Trainer, module: RunModule, checkpoint: Path | None) -> None:
    with quiet(), torch.random.fork_rng(devices=[]):
        try:
            trainer.fit(module, ckpt_path=None if checkpoint is None else str(checkpoint))
        except SystemExit:
            # Lightning turns an interrupt into an exit; the caller decides what an interrupt means.
            ended = [x for x in trainer.checkpoint_callbacks if isinstance(x, PreemptionCallback)]
            received = ended[0].received
            raise (KeyboardInterrupt if received is None else Preempted(received)) from None
        except MisconfigurationException as error:
            raise UserError(f"Lightning refuses these settings: {' '.join(str(error).split())}") from None
        except RuntimeError as error:
            if trainer.world_size > 1 and LOST.search(str(error)):
                raise LostProcess(
                    "another process of this run has ended or cannot be reached: start all of them again."
                ) from error
            raise


class _LogFile(logging.FileHandler):
    """A log that cannot be written, because the disk is full, neither ends a run nor prints a stack trace."""

    def handleError(self, record: logging.LogRecord) -> None:
        pass

    def close(self) -> None:
        with suppress(OSError):
            super().close()


@contextmanager
def _logging(run: RunFolder, first_line: str) -> Iterator[None]:
    """Copy log messages of the run to its log file."""
    handler = _LogFile(run.log)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    log.addHandler(handler)
    level = log.level
    log.setLevel(logging.INFO)
    try:
        log.info(first_line)
        yield
    except BaseException as error:
        log.info("stopped: %s: %s", type(error).__name__, error)  # the caller tells the user
        raise
    finally:
        log.setLevel(level)
        log.removeHandler(handler)
        handler.close()
