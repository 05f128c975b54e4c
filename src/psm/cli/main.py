"""The command line: parse, call, print. Nothing heavy is imported before it is needed."""

import logging
import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

from psm.config.help import help_text
from psm.config.schema import METHOD_GROUPS, ExperimentConfig, PretrainConfig
from psm.utils.deprecation import RenamedWarning
from psm.utils.errors import Diverged, Preempted, ResourceError, UserError, did_you_mean
from psm.utils.resources import resources_explained

USAGE = """psm: learn image encoders from unlabeled images by contrastive learning with mined samples

  psm pretrain out=runs/a data=cifar10 method=psm epochs=200
  psm evaluate runs/a
  psm inspect runs/a
  psm embed runs/a data=FOLDER out=features.parquet
  psm search features.parquet query=photo.jpg
  psm explore runs/a data=FOLDER
  psm export runs/a format=onnx
  psm finetune runs/a data=LABELED out=runs/clf
  psm predict runs/clf data=FOLDER out=labels.csv
  psm worth runs/a data=LABELED
  psm methods [method=psm]
  psm data [data=cifar10]
  psm experiment run table1 preset=laptop out=study
  psm runs
  psm completion bash >> ~/.bash_completion

Arguments are key=value, nested keys dotted (positives.k=10); config=FILE.yaml gives many at once.
`psm COMMAND --help` shows the keys of a command, `psm COMMAND --help GROUP` those of a group, `--help all` all."""

_SHOW_WARNING = warnings.showwarning
HELP = ("-h", "--help", "help")


# Each command is a module of this folder: `Config`, its settings, and `run(arguments)`, which may return an exit code.
COMMANDS = (
    *("pretrain", "evaluate", "inspect", "embed", "search", "explore", "export"),
    *("finetune", "predict", "worth", "methods", "data", "experiment", "runs", "completion"),
)


# Exit codes after signals. Schedulers send SIGUSR1 some time before the end; 75 (EX_TEMPFAIL) asks to be queued again.
EXIT_CODES = {int(signal.SIGTERM): 143} | ({int(signal.SIGUSR1): 75} if hasattr(signal, "SIGUSR1") else {})


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Returns 0 when it went well, 2 for a user's mistake, 1 for any other failure (a full disk, memory that ran out, a
    loss that is no number), 130 after Ctrl-C, 143 after SIGTERM, 75 after SIGUSR1.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    try:
        with _terminable() as terminated, resources_explained():
            return _run(arguments)
    except UserError as error:
        if _is_first():
            print(f"psm: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as error:
        return _interrupted(arguments, error.number if isinstance(error, Preempted) else next(iter(terminated), 0))
    except (Diverged, ResourceError) as error:
        print(f"psm: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # whoever read the output has had enough of it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


@contextmanager
def _terminable() -> Iterator[list[int]]:
    """SIGTERM and SIGUSR1 interrupt as Ctrl-C does; the list then holds the number of the signal."""
    received: list[int] = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        if not received:  # once: stopping in order takes a moment
            received.append(number)
            raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    before = {number: signal.signal(number, interrupt) for number in EXIT_CODES}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _interrupted(arguments: Sequence[str], number: int) -> int:
    """Say that the command was stopped, by Ctrl-C or a signal, and, where there is something to continue, how."""
    if _is_first():
        stopped = f"ended by {signal.Signals(number).name}" if number else "interrupted"
        print(f"psm: {stopped}{_how_to_continue(arguments)}.", file=sys.stderr)
    return EXIT_CODES.get(number, 130)


def _is_first() -> bool:
    """True but for the second and later processes of a run, whose mistakes the first one reports."""
    distributed = sys.modules.get("psm.training.distributed")  # not imported: nothing runs in several processes
    return distributed is None or distributed.is_rank_zero()


def _how_to_continue(arguments: Sequence[str]) -> str:
    from psm.utils.run_folder import RunFolder

    command, *rest = arguments or [""]
    if command in ("experiment", "embed", "explore", "worth"):
        return "; the same command continues where it was"
    if command not in ("pretrain", "finetune"):
        return ""
    out = next((argument.partition("=")[2] for argument in rest if argument.startswith("out=")), "")
    if out and RunFolder(Path(out).expanduser()).checkpoint.exists():
        return f"; `psm {command} out={out} resume=true` continues the run"
    return " before anything was saved"


def _run(arguments: list[str]) -> int:
    if not arguments or arguments[0] in HELP:
        print(USAGE)
        return 0
    if arguments[0] in ("-V", "--version"):
        from importlib.metadata import version

        from psm.ops import kernel_status

        print(f"psm {version('psm')} (kernels: {kernel_status()})")
        return 0
    name, *rest = arguments
    if name not in COMMANDS:
        hint = did_you_mean(name, COMMANDS)
        raise UserError(f"{name!r} is not a command{hint}: choose one of {', '.join(COMMANDS)}; see `psm --help`.")
    command = import_module(f"psm.cli.{name}")
    asked = next((place for place, word in enumerate(rest) if word in HELP), None)
    if asked is not None:
        print(_help(name, command.Config, next((word for word in rest[asked + 1 :] if "=" not in word), "")))
        return 0
    _speak_on_stderr()
    return command.run(rest) or 0


def _help(name: str, schema: type, topic: str) -> str:
    if topic in METHOD_GROUPS and name in ("pretrain", "experiment"):
        from psm.methods.help import method_group_help

        return method_group_help(topic)
    if schema is not ExperimentConfig:
        return help_text(f"psm {name}", [schema], topic)
    from psm.experiments.plan import RESERVED

    return help_text(f"psm {name}", [schema, PretrainConfig], topic, hidden=RESERVED)


def _show_warning(message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> None:
    """A former name of psm's own in one line; other libraries' warnings as ever."""
    if issubclass(category, RenamedWarning):
        print(f"psm: {message}", file=sys.stderr)
    else:
        _SHOW_WARNING(message, category, *place, **more)


class _Stderr(logging.StreamHandler[TextIO]):
    """Writes to whatever stderr is at the moment: a progress bar stands in for it to keep its own line whole."""

    @property
    def stream(self) -> TextIO:
        return sys.stderr

    @stream.setter
    def stream(self, value: TextIO) -> None:
        pass


def _is_from_rank_zero(record: logging.LogRecord) -> bool:
    from psm.training.distributed import is_rank_zero  # imports torch: only once there is something to say

    return is_rank_zero()


def _speak_on_stderr() -> None:
    """Warnings are for the user's eyes; the rest goes to the run's log alone."""
    warnings.showwarning = _show_warning
    handler = _Stderr()
    handler.setLevel(logging.WARNING)
    handler.setFormatter(logging.Formatter("psm: %(message)s"))
    handler.addFilter(_is_from_rank_zero)
    logging.getLogger("psm").addHandler(handler)


if __name__ == "__main__":
    sys.exit(main())
