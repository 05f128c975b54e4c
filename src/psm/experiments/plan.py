"""From a request to runs: every configuration with its data and seed becomes a run that its settings name.

A run's name ends in a hash of all settings that would make it another run, so that equal configurations of several
experiments are one run, and a changed setting is a new one. Imports nothing heavy.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from psm.config import merge as settings
from psm.config.schema import MAY_CHANGE, EvaluateConfig, ExperimentConfig, PretrainConfig
from psm.data.registry import NAMES
from psm.experiments import catalog, presets
from psm.experiments.catalog import Configuration, Experiment
from psm.methods import KINDS, METHODS
from psm.methods.build import GROUPS, method_of
from psm.methods.plugins import load_plugins
from psm.utils.errors import UserError, did_you_mean

# The suite decides these itself.
RESERVED = ("out", "data", "method", "seed", "resume", "overwrite", "progress")
DATA_TITLES = {"cifar10": "CIFAR-10", "cifar100": "CIFAR-100", "tiny-imagenet": "TinyImageNet", "shapes": "Shapes"}
BASELINES = {"raw pixels": "Raw pixels", "untrained encoder": "Untrained encoder"}


@dataclass(frozen=True)
class Request:
    """What the user asked for: experiments by name, the suite's own keys, and keys of `psm pretrain` for every run."""

    names: tuple[str, ...]
    config: ExperimentConfig
    keys: Mapping[str, Any]
    given: Mapping[str, Any]  # all that was given, to repeat it


@dataclass(frozen=True)
class PlannedRun:
    """One run to train and score."""

    run: str  # its name, also that of its folder
    title: str
    method: str
    data: str
    seed: int
    settings: Mapping[str, Any]  # keys of `psm pretrain`
    evaluation: Mapping[str, Any]  # keys of `psm evaluate`
    evaluated: str  # hash of those
    baseline: str  # name of the baselines that belong beside it
    gradients: bool

    @property
    def epochs(self) -> int:
        return self.settings["epochs"]


@dataclass(frozen=True)
class Place:
    """Where a run belongs: a row of an experiment, on one data set and under one protocol."""

    experiment: str
    data: str
    protocol: str
    title: str
    seed: int
    run: str
    evaluated: str
    command: str  # repeats it


@dataclass(frozen=True)
class Plan:
    """All runs, each once, and the places that they fill."""

    runs: tuple[PlannedRun, ...]
    places: tuple[Place, ...]


def read_request(names: Sequence[str], *overrides: Mapping[str, Any]) -> Request:
    """Sort keys into the suite's own and those of `psm pretrain`; the later overrides win."""
    own = {row.key: row for row in settings.rows(ExperimentConfig)}
    mine, runs = {}, {}
    for override in overrides:
        for dotted, value in settings.flatten(override, own):
            if dotted in own:
                lists = "list" in own[dotted].type and value is not None
                mine[dotted] = [value] if lists and not isinstance(value, (list, tuple)) else value
            else:
                runs[dotted] = value
    check_keys(runs)
    preset = presets.find(mine.get("preset", ExperimentConfig().preset))
    beforehand = {dotted: value for dotted, value in preset.settings.items() if dotted in own}
    config = settings.build(ExperimentConfig, beforehand, mine)
    config = replace(config, plugins=load_plugins(config.plugins))
    _check(config)
    catalog.find(list(names))
    return Request(tuple(names), config, runs, mine | runs)


def check_keys(dotted_keys: Iterable[str]) -> None:
    """Refuse keys that are neither the suite's own nor those of `psm pretrain` that it passes on."""
    own = [row.key for row in settings.rows(ExperimentConfig)]
    passed = [row.key for row in settings.rows(PretrainConfig) if row.key not in RESERVED]
    known = [*own, *passed, "config"]
    for dotted in dotted_keys:
        if dotted in known or dotted.partition(".")[0] in (*GROUPS, "trainer"):
            continue
        if dotted in ("seed", "method"):
            raise UserError(f"{dotted!r} is the suite's to set: give {dotted}s=[...] instead.")
        if dotted in RESERVED:
            raise UserError(f"{dotted!r} is the suite's to set: the same command continues what is there.")
        hint = did_you_mean(dotted, known)
        raise UserError(f"{dotted!r} is not a key of `psm experiment`{hint}; all keys: `psm experiment --help`.")


def _check(config: ExperimentConfig) -> None:
    for name, value in (("data", config.data), ("seeds", config.seeds), ("methods", config.methods)):
        if value is not None and not value:
            raise UserError(f"{name}=[] leaves nothing to run: name some, or leave it out.")
    if config.jobs < 1:
        raise UserError(f"jobs={config.jobs} runs nothing: give 1 or more.")
    if not config.out:
        raise UserError("out= is empty: name a folder for the study, for example out=study.")
    for method in config.methods or ():
        if method not in METHODS:
            hint = did_you_mean(method, METHODS)
            raise UserError(f"methods=[{method}] is unknown{hint}: choose from {', '.join(METHODS)}.")


def make_plan(request: Request) -> Plan:
    """Every run that the request needs, once, the first seed of everything first, and where each belongs."""
    runs: dict[str, PlannedRun] = {}
    places: list[Place] = []
    preset = presets.find(request.config.preset)
    for experiment in catalog.find(list(request.names)):
        command = command_of(experiment.name, request)
        rows = _chosen(experiment, request.config.methods)
        for data in request.config.data or preset.data or experiment.data:
            protocol = _protocol(request, preset, data)
            for row in rows:
                for seed in _seeds(experiment, row, request.config, preset):
                    run = _planned(row, request, preset, data, seed)
                    known = runs.get(run.run, run)
                    runs[run.run] = replace(known, gradients=known.gradients or run.gradients)
                    filled = [(row.title, run.run)]
                    if experiment.draws == "table":
                        filled += [(title, f"{run.baseline}/{of}") for of, title in BASELINES.items()]
                    for title, name in filled:
                        where = (experiment.name, data_name(data), protocol)
                        place = Place(*where, title, seed, name, run.evaluated, command)
                        places += [] if place in places else [place]
    if not runs:
        raise UserError(
            f"methods=[{','.join(request.config.methods or ())}] has no row in {', '.join(request.names)}: "
            "see `psm experiment list`."
        )
    return Plan(tuple(sorted(runs.values(), key=lambda run: _turn(run.seed, runs))), tuple(places))


def _turn(seed: int, runs: Mapping[str, PlannedRun]) -> int:
    """Seeds in the order in which they are first named: a study that is cut short has all of the first seed."""
    return list(dict.fromkeys(run.seed for run in runs.values())).index(seed)


def _chosen(experiment: Experiment, methods: list[str] | None) -> list[Configuration]:
    return [row for row in experiment.configurations if not methods or row.settings["method"] in methods]


def _seeds(
    experiment: Experiment, row: Configuration, config: ExperimentConfig, preset: presets.Preset
) -> Sequence[int]:
    """A sweep's points have one seed each; the row that they are compared with has all, to show the spread."""
    if config.seeds is not None:
        return list(dict.fromkeys(config.seeds))
    return preset.sweep_seeds if experiment.sweeps and row.against else preset.seeds


def _common(request: Request, preset: presets.Preset, data: str) -> dict[str, Any]:
    own = {row.key for row in settings.rows(ExperimentConfig)}
    given = {k: v for k, v in preset.settings.items() if k not in own} | dict(request.keys)
    return given | {"data": placed(data), "plugins": request.config.plugins}


def _planned(row: Configuration, request: Request, preset: presets.Preset, data: str, seed: int) -> PlannedRun:
    overrides = _common(request, preset, data) | dict(row.settings) | {"seed": seed}
    full = resolved(overrides)
    evaluation = _evaluation(request.config, seed)
    changed = _changes(full)
    matters = {k: v for k, v in full.items() if k not in MAY_CHANGE and not _off(k, v)}
    name = "-".join([data_title(data).lower(), full["method"], *(_slug(k, v) for k, v in changed.items()), f"s{seed}"])
    shown = ("images.", "views.size", "encoder", "stem", "data", "seed", "precision")
    seen = {k: v for k, v in matters.items() if k.startswith(shown)}
    return PlannedRun(
        run=f"{name}-{_hash(matters)}",
        title=" ".join([full["method"], *(f"{k}={str(v).lower()}" for k, v in changed.items())]),
        method=full["method"],
        data=data,
        seed=seed,
        settings=overrides | {"epochs": full["epochs"]},
        evaluation=evaluation,
        evaluated=_hash({k: v for k, v in evaluation.items() if not _off(k, v)}),
        baseline=f"{data_title(data).lower()}-baselines-s{seed}-{_hash(seen)}",
        gradients=row.gradients,
    )


def command_of(name: str, request: Request) -> str:
    """What to type to repeat an experiment; where images lie is another matter on every machine."""
    given = {k: v for k, v in request.given.items() if k not in MAY_CHANGE}
    given = {"preset": request.config.preset} | given
    if "data" in given:
        given["data"] = [data_name(data) for data in given["data"]]
    return " ".join(["psm experiment run", name, *(f"{key}={_typed(value)}" for key, value in given.items())])


def _typed(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return f"[{','.join(_typed(item) for item in value)}]"
    if value is None or isinstance(value, bool):
        return str(value).lower()
    return str(value)


def placed(data: str) -> str:
    """A set's name as it is; a folder by its full path, wherever the command was given."""
    return data if data in NAMES else str(Path(data).expanduser().resolve())


def data_name(data: str) -> str:
    """A data set as results name it: a published one by its name, a folder without where it lies."""
    return data if data in NAMES else Path(data).expanduser().resolve().name or data


def data_title(data: str) -> str:
    """A data set as it is called on pages: the paper's names, or that of the folder."""
    return DATA_TITLES.get(data, data_name(data))


def resolved(overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Every key of `psm pretrain` with its value, what the method says filled in."""
    seed = {"seed": overrides["seed"]} if "seed" in overrides else {}
    return _resolved(json.dumps({k: v for k, v in overrides.items() if k != "seed"})) | seed


@cache
def _resolved(overrides: str) -> dict[str, Any]:
    """Building is slow, and runs differ in the seed alone where they do not differ in their row."""
    config = settings.build(PretrainConfig, json.loads(overrides))
    full = replace(config, **method_of(config).to_dict())
    return dict(settings.flatten(settings.to_dict(full)))


def _changes(full: Mapping[str, Any]) -> dict[str, Any]:
    """How a run's method differs from its row of the table, but for the bank's size, which is a matter of scale."""
    row = dict(settings.flatten(METHODS[full["method"]].spec.to_dict()))
    mine = {k: v for k, v in full.items() if k.partition(".")[0] in GROUPS and k != "bank.size"}
    return {k: v for k, v in mine.items() if row.get(k) != v}


def _slug(dotted: str, value: Any) -> str:
    """``k10`` for positives.k=10, ``sampler-none`` for sampler.name=none."""
    group, _, name = dotted.rpartition(".")
    if group in KINDS and name == KINDS[group].selector:
        return f"{group}-{value}"
    if isinstance(value, bool):
        return name if value else f"no-{name}"
    return f"{name}{value:g}" if isinstance(value, (int, float)) else f"{name}{value}"


def _evaluation(config: ExperimentConfig, seed: int) -> dict[str, Any]:
    keys = {row.key for row in settings.rows(EvaluateConfig) if row.key.startswith(("knn.", "linear."))}
    flat = dict(settings.flatten({"knn": asdict(config.knn), "linear": asdict(config.linear)}))
    return {key: flat[key] for key in sorted(keys)} | {"seed": seed}


def _protocol(request: Request, preset: presets.Preset, data: str) -> str:
    """A hash of all that the rows of one table have in common: scores are compared within it and never across."""
    full = resolved(_common(request, preset, data))
    full |= _evaluation(request.config, 0)
    apart = {*MAY_CHANGE, "seed", "method", "monitor.purity"}
    return _hash({k: v for k, v in full.items() if k not in apart and not _off(k, v)})


@cache
def _off_by_default() -> dict[str, Any]:
    blank = settings.to_dict(PretrainConfig()) | settings.to_dict(EvaluateConfig())
    return {k: v for k, v in settings.flatten(blank) if v is None or v is False or v == []}


def _off(dotted: str, value: Any) -> bool:
    """Whether a key is left at a default of none or false: a later version's new keys then rename no finished run."""
    return dotted in _off_by_default() and value == _off_by_default()[dotted]


def _hash(values: Mapping[str, Any]) -> str:
    text = json.dumps(values, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=5).hexdigest()
