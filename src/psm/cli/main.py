"""The command line: parse, call, print. Nothing heavy is imported before it is needed."""

import dataclasses
import logging
import os
import sys
from collections.abc import Callable, Sequence

from psm.config import merge as settings
from psm.config.schema import DataConfig, EvaluateConfig, ExperimentConfig, InspectConfig, MethodsConfig, PretrainConfig
from psm.utils.errors import Diverged, UserError, did_you_mean

USAGE = """psm: learn image encoders from unlabeled images by contrastive learning with mined samples

  psm pretrain out=runs/a data=cifar10 method=psm epochs=200
  psm evaluate checkpoint=runs/a
  psm inspect runs/a
  psm methods [method=psm]
  psm data [data=cifar10]
  psm experiment run table1 preset=laptop out=study

Arguments are key=value, nested keys dotted (positives.k=10); config=FILE.yaml gives many at once.
`psm COMMAND --help` lists every key of a command."""


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
    print(f"score:   psm evaluate checkpoint={result.out}")


def evaluate(arguments: Sequence[str]) -> None:
    overrides = settings.parse(arguments, EvaluateConfig)
    settings.build(EvaluateConfig, *overrides)
    from psm.evaluation.evaluate import run_evaluation
    from psm.reporting.run_page import write_page
    from psm.reporting.terminal import scores_table

    evaluation = run_evaluation(*overrides)
    scores_table(evaluation.scores)
    if evaluation.run is not None:
        print(f"page: {write_page(evaluation.run, evaluation.training_data)}")


def inspect(arguments: Sequence[str]) -> None:
    first, *rest = arguments or [""]
    named = bool(first) and "=" not in first and not first.startswith("-")  # `psm inspect runs/a` is how it is said
    overrides = settings.parse([f"run={first}", *rest] if named else arguments, InspectConfig)
    settings.build(InspectConfig, *overrides)
    from psm.reporting.inspector import run_inspection

    inspection = run_inspection(*overrides)
    print(f"page: {inspection.page} ({inspection.page.stat().st_size / 1e6:.1f} MB)")
    for sentence in inspection.remarks:
        print(sentence)


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
    """Run a command; 0 when it went well, 2 for a user's mistake, 1 for any other failure, 130 when interrupted."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    try:
        return _run(arguments)
    except UserError as error:
        print(f"psm: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("psm: interrupted; resume=true continues a run.", file=sys.stderr)
        return 130
    except Diverged as error:
        print(f"psm: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # whoever read the output has had enough of it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _run(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(USAGE)
        return 0
    if arguments[0] in ("-V", "--version"):
        from importlib.metadata import version

        from psm.kernels import status

        print(f"psm {version('psm')} (kernels: {status()})")
        return 0
    name, *rest = arguments
    if name not in COMMANDS:
        hint = did_you_mean(name, COMMANDS)
        raise UserError(f"{name!r} is not a command{hint}: choose one of {', '.join(COMMANDS)}; see `psm --help`.")
    command, schema = COMMANDS[name]
    if any(word in ("-h", "--help", "help") for word in rest):
        print(help_text(schema))
        if schema is ExperimentConfig:
            from psm.cli.experiment import help_of_runs

            print(help_of_runs())
        return 0
    _speak_on_stderr()
    return command(rest) or 0


class _Stderr(logging.StreamHandler):
    """Writes to whatever stderr is at the moment: a progress bar stands in for it to keep its own line whole."""

    stream = property(lambda self: sys.stderr, lambda self, value: None)


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


def help_text(schema: type) -> str:
    """Every key of a command with its type, default and a line of meaning."""
    title = " ".join((schema.__doc__ or "").split())
    lines = [
        title,
        "",
        "key=value, nested keys dotted; config=FILE.yaml reads keys from a file first.",
        "",
    ]
    return "\n".join([*lines, *key_lines(schema, list(settings.rows(schema)))])


def key_lines(schema: type, table: Sequence[settings.Row]) -> list[str]:
    """A line for each of these keys of a configuration class, groups under what they are for."""
    lines = []
    width = max(len(row.key) for row in table)
    kinds = max(len(row.type) for row in table)
    group = ""
    for row in table:
        now = row.key.rpartition(".")[0]
        if now != group:
            group = now
            hint = {f.name: f.type for f in dataclasses.fields(schema)}[group]
            lines += ["", f"{' '.join((hint.__doc__ or '').split())}"]
        lines.append(f"  {row.key:<{width}}  {row.type:<{kinds}}  {row.default:<8}  {row.meaning}")
    return lines


if __name__ == "__main__":
    sys.exit(main())
