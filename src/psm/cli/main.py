"""The command line: parse, call, print. Nothing heavy is imported before it is needed."""

import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TextIO

from psm.config import merge as settings
from psm.config.help import help_text
from psm.config.schema import (
    METHOD_GROUPS,
    DataConfig,
    EvaluateConfig,
    ExperimentConfig,
    InspectConfig,
    MethodsConfig,
    PretrainConfig,
)
from psm.utils.errors import Diverged, UserError, did_you_mean

USAGE = """psm: learn image encoders from unlabeled images by contrastive learning with mined samples

  psm pretrain out=runs/a data=cifar10 method=psm epochs=200
  psm evaluate runs/a
  psm inspect runs/a
  psm methods [method=psm]
  psm data [data=cifar10]
  psm experiment run table1 preset=laptop out=study

Arguments are key=value, nested keys dotted (positives.k=10); config=FILE.yaml gives many at once.
`psm COMMAND --help` shows the keys of a command, `psm COMMAND --help GROUP` those of a group, `--help all` all."""

HELP = ("-h", "--help", "help")


def pretrain(arguments: Sequence[str]) -> None:
    overrides = settings.parse(arguments, PretrainConfig)
    settings.build(PretrainConfig, *overrides)  # a mistyped key is answered before anything heavy is imported
    from psm.ops import keep_freed_memory
    from psm.reporting.run_page import write_page
    from psm.training.distributed import is_rank_zero
    from psm.training.pretrain import run_pretraining

    keep_freed_memory()
    result = run_pretraining(*overrides)
    if not is_rank_zero():
        return
    print(f"encoder: {result.out / 'encoder.safetensors'}")
    print(f"page:    {write_page(result.out, result.data)}")
    if result.data.test is not None:
        print(f"score:   psm evaluate {result.out}")
    else:  # without labels there is nothing to score by
        print(f"look:    psm inspect {result.out}")


def evaluate(arguments: Sequence[str]) -> None:
    overrides = settings.parse(_with_positional(arguments, "checkpoint"), EvaluateConfig)
    settings.build(EvaluateConfig, *overrides)
    from psm.evaluation.evaluate import run_evaluation
    from psm.reporting.run_page import write_page
    from psm.reporting.terminal import scores_table

    evaluation = run_evaluation(*overrides)
    scores_table(evaluation.scores)
    if evaluation.run is not None:
        print(f"page: {write_page(evaluation.run, evaluation.training_data)}")


def inspect(arguments: Sequence[str]) -> None:
    overrides = settings.parse(_with_positional(arguments, "run"), InspectConfig)
    settings.build(InspectConfig, *overrides)
    from psm.reporting.inspector import run_inspection

    inspection = run_inspection(*overrides)
    print(f"page: {inspection.page} ({inspection.page.stat().st_size / 1e6:.1f} MB)")
    for sentence in inspection.remarks:
        print(sentence)


def _with_positional(arguments: Sequence[str], name: str) -> Sequence[str]:
    """The arguments with a first one that is no key=value, as in `psm inspect runs/a`, as the value of a key."""
    first, *rest = arguments or [""]
    named = bool(first) and "=" not in first and not first.startswith("-")
    return [f"{name}={first}", *rest] if named else arguments


def methods(arguments: Sequence[str]) -> None:
    config = settings.build(MethodsConfig, *settings.parse(arguments, MethodsConfig))
    from psm.methods.plugins import load_plugins
    from psm.reporting.terminal import method_table, methods_table

    load_plugins(config.plugins)
    method_table(config.method) if config.method else methods_table()


def data(arguments: Sequence[str]) -> None:
    config = settings.build(DataConfig, *settings.parse(arguments, DataConfig))
    from psm.reporting.terminal import data_table, published_table

    if config.sheet and not config.data:
        raise UserError("sheet= shows images of a data set: give data= too.")
    data_table(config) if config.data else published_table()


def experiment(arguments: Sequence[str]) -> int:
    from psm.cli.experiment import experiment

    return experiment(arguments)


COMMANDS: dict[str, tuple[Callable[[Sequence[str]], int | None], type]] = {
    "pretrain": (pretrain, PretrainConfig),
    "evaluate": (evaluate, EvaluateConfig),
    "inspect": (inspect, InspectConfig),
    "methods": (methods, MethodsConfig),
    "data": (data, DataConfig),
    "experiment": (experiment, ExperimentConfig),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Returns 0 when it went well, 2 for a user's mistake, 1 for any other failure, 130 after Ctrl-C, 143 after SIGTERM.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    try:
        with _terminable() as terminated:
            return _run(arguments)
    except UserError as error:
        print(f"psm: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return _interrupted(arguments, bool(terminated))
    except Diverged as error:
        print(f"psm: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # whoever read the output has had enough of it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


@contextmanager
def _terminable() -> Iterator[list[int]]:
    """SIGTERM interrupts as Ctrl-C does; the list then holds its number."""
    received: list[int] = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        if not received:  # once: stopping in order takes a moment
            received.append(number)
            raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield received
    finally:
        signal.signal(signal.SIGTERM, before)


def _interrupted(arguments: Sequence[str], terminated: bool) -> int:
    """Say that the command was stopped and, where there is something to continue, how."""
    distributed = sys.modules.get("psm.training.distributed")  # not imported: nothing runs in several processes
    if distributed is None or distributed.is_rank_zero():
        stopped = "ended by SIGTERM" if terminated else "interrupted"
        print(f"psm: {stopped}{_how_to_continue(arguments)}.", file=sys.stderr)
    return 143 if terminated else 130


def _how_to_continue(arguments: Sequence[str]) -> str:
    from psm.utils.run_folder import RunFolder

    command, *rest = arguments or [""]
    if command == "experiment":
        return "; the same command continues where it was"
    if command != "pretrain":
        return ""
    out = next((argument.partition("=")[2] for argument in rest if argument.startswith("out=")), "")
    if out and RunFolder(Path(out).expanduser()).checkpoint.exists():
        return f"; `psm pretrain out={out} resume=true` continues the run"
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
    command, schema = COMMANDS[name]
    asked = next((place for place, word in enumerate(rest) if word in HELP), None)
    if asked is not None:
        print(_help(name, schema, next((word for word in rest[asked + 1 :] if "=" not in word), "")))
        return 0
    _speak_on_stderr()
    return command(rest) or 0


def _help(name: str, schema: type, topic: str) -> str:
    if topic in METHOD_GROUPS and name in ("pretrain", "experiment"):
        from psm.methods.help import method_group_help

        return method_group_help(topic)
    if schema is not ExperimentConfig:
        return help_text(f"psm {name}", [schema], topic)
    from psm.experiments.plan import RESERVED

    return help_text(f"psm {name}", [schema, PretrainConfig], topic, hidden=RESERVED)


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
    handler = _Stderr()
    handler.setLevel(logging.WARNING)
    handler.setFormatter(logging.Formatter("psm: %(message)s"))
    handler.addFilter(_is_from_rank_zero)
    logging.getLogger("psm").addHandler(handler)


if __name__ == "__main__":
    sys.exit(main())
