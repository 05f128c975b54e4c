"""From a request to runs: each configuration with its data set and seed becomes a run named by its settings.

A run's name ends in a hash of all settings that would change it: equal configurations of several experiments are one
run, and a changed setting is a new one. Imports nothing heavy.
"""

import hashlib
import json
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, get_origin

from psm.config import merge as settings
from psm.config.schema import MACHINE_KEYS, MAY_CHANGE, METHOD_GROUPS, EvaluateConfig, ExperimentConfig, PretrainConfig
from psm.data.registry import NAMES
from psm.experiments import catalog, presets
from psm.experiments.catalog import Configuration, Experiment
from psm.experiments.tuned import Entries, read_tuned, tuned_settings
from psm.utils.errors import UserError, did_you_mean

# Keys of `psm pretrain` that the suite sets itself.
DEVICE_FREE = {"precision": "32-true"}  # what the device would decide otherwise: results are compared between machines
RESERVED = ("out", "data", "method", "seed", "preset", "resume", "overwrite", "progress")
FREE_GROUPS = ("trainer", "ddp", "slurm")  # groups that take any key
DATA_TITLES = {"cifar10": "CIFAR-10", "cifar100": "CIFAR-100", "tiny-imagenet": "TinyImageNet", "shapes": "Shapes"}
BASELINES = {"raw pixels": "Raw pixels", "untrained encoder": "Untrained encoder"}


@dataclass(frozen=True)
class Request:
    """Experiments by name, the suite's own keys, and keys of `psm pretrain` for every run."""

    names: tuple[str, ...]
    config: ExperimentConfig
    keys: Mapping[str, Any]
    given: Mapping[str, Any]  # all keys of the user, to repeat the command


@dataclass(frozen=True)
class PlannedRun:
    """One run to train and score."""

    name: str  # also the name of its folder
    title: str
    method: str
    data: str
    seed: int
    settings: Mapping[str, Any]  # keys of `psm pretrain`
    evaluation: Mapping[str, Any]  # keys of `psm evaluate`
    evaluation_hash: str
    baselines: str  # name of the record with the baselines of its data set and seed
    gradients: bool

    @property
    def epochs(self) -> int:
        return self.settings["epochs"]


@dataclass(frozen=True)
class PlanEntry:
    """Assigns a run to a row of an experiment, on one data set and under one protocol."""

    experiment: str
    data: str
    protocol: str
    title: str  # of the row
    seed: int
    run: str
    evaluation_hash: str
    command: str  # repeats the experiment


@dataclass(frozen=True)
class Plan:
    """All runs, each once, and the table entries that use them."""

    runs: tuple[PlannedRun, ...]
    entries: tuple[PlanEntry, ...]


def read_request(names: Sequence[str], *overrides: Mapping[str, Any]) -> Request:
    """Split keys into the suite's own and those of `psm pretrain`; later overrides win."""
    own_rows = {row.key: row for row in settings.rows(ExperimentConfig)}
    own: dict[str, Any] = {}
    passed: dict[str, Any] = {}
    for override in overrides:
        for dotted, value in settings.flatten(override, own_rows):
            if dotted.startswith("slurm."):
                own[dotted] = value
            elif dotted in own_rows:
                is_list = all(get_origin(kind) is list for kind in own_rows[dotted].kinds) and value is not None
                own[dotted] = [value] if is_list and not isinstance(value, (list, tuple)) else value
            else:
                passed[dotted] = value
    check_keys(passed)
    preset = presets.find(str(own.get("preset", ExperimentConfig().preset)))
    of_preset = {dotted: value for dotted, value in preset.settings.items() if dotted in own_rows}
    config = settings.build(ExperimentConfig, of_preset, own)
    if config.plugins:
        from psm.methods.plugins import load_plugins

        config = replace(config, plugins=load_plugins(config.plugins))
    _check_methods(config)
    _check_rows(config, catalog.find(list(names)))
    return Request(tuple(names), config, passed, own | passed)


def check_keys(dotted_keys: Iterable[str]) -> None:
    """Refuse keys that are neither the suite's own nor passed on to `psm pretrain`."""
    own = [row.key for row in settings.rows(ExperimentConfig)]
    passed = [row.key for row in settings.rows(PretrainConfig) if row.key not in RESERVED]
    known = [*own, *passed, "config"]
    for dotted in dotted_keys:
        if dotted in known or dotted.partition(".")[0] in (*METHOD_GROUPS, *FREE_GROUPS):
            continue
        if dotted in ("seed", "method"):
            raise UserError(f"{dotted!r} is set by the suite: give {dotted}s=[...] instead.")
        if dotted in RESERVED:
            raise UserError(f"{dotted!r} is set by the suite: the same command continues an unfinished study.")
        hint = did_you_mean(dotted, known)
        raise UserError(f"{dotted!r} is not a key of `psm experiment`{hint}; all keys: `psm experiment --help`.")


def _check_methods(config: ExperimentConfig) -> None:
    if not config.methods:
        return
    from psm.methods import list_methods

    known = list_methods()
    for method in config.methods:
        if method not in known:
            hint = did_you_mean(method, known)
            raise UserError(f"methods=[{method}] is unknown{hint}: choose from {', '.join(known)}.")


def _check_rows(config: ExperimentConfig, experiments: Sequence[Experiment]) -> None:
    experiments = experiments or tuple(catalog.EXPERIMENTS.values())
    known = list(dict.fromkeys(row.title for experiment in experiments for row in experiment.configurations))
    for title in config.rows or ():
        if title not in known:
            names = ", ".join(experiment.name for experiment in experiments)
            hint = did_you_mean(title, known)
            raise UserError(f"rows=['{title}'] is no row of {names}{hint}: choose from {'; '.join(known)}.")


def make_plan(request: Request) -> Plan:
    """All runs of the request, the first seed of everything first, and their table entries."""
    runs: dict[str, PlannedRun] = {}
    entries: dict[PlanEntry, None] = {}  # in order, without repeats
    for experiment in catalog.find(list(request.names)):
        for run, of_run in _planned_rows(experiment, request):
            known = runs.get(run.name, run)
            runs[run.name] = replace(known, gradients=known.gradients or run.gradients)
            entries |= dict.fromkeys(of_run)
    if not runs:
        given = {"methods": request.config.methods, "rows": request.config.rows}
        asked = " with ".join(f"{key}={_typed(value)}" for key, value in given.items() if value)
        raise UserError(f"{asked} has no row in {', '.join(request.names)}: see `psm experiment list`.")
    # A study that is cut short then has all runs of the first seed.
    seeds = list(dict.fromkeys(run.seed for run in runs.values()))
    return Plan(tuple(sorted(runs.values(), key=lambda run: seeds.index(run.seed))), tuple(entries))


def _planned_rows(experiment: Experiment, request: Request) -> Iterator[tuple[PlannedRun, list[PlanEntry]]]:
    """Each run of an experiment with its table entries."""
    preset = presets.find(request.config.preset)
    command = command_of(experiment.name, request)
    methods, titles = request.config.methods, request.config.rows
    rows = [
        row
        for row in experiment.configurations
        if (not methods or row.settings["method"] in methods) and (not titles or row.title in titles)
    ]
    for data in request.config.data or preset.data or experiment.data:
        protocol = _protocol(request, preset, data)
        for row in rows:
            for seed in _seeds(experiment, row, request.config, preset):
                run = _planned_run(row, request, preset, data, seed)
                named = {row.title: run.name}
                if experiment.kind == "table":
                    named |= {title: f"{run.baselines}/{of}" for of, title in BASELINES.items()}
                where = (experiment.name, data_name(data), protocol)
                yield (
                    run,
                    [
                        PlanEntry(*where, title, seed, name, run.evaluation_hash, command)
                        for title, name in named.items()
                    ],
                )


def _seeds(
    experiment: Experiment, row: Configuration, config: ExperimentConfig, preset: presets.Preset
) -> Sequence[int]:
    """Seeds of a row: in a sweep all rows but the reference may have fewer."""
    if config.seeds is not None:
        return list(dict.fromkeys(config.seeds))
    if experiment.seeds is not None:
        return experiment.seeds
    return preset.sweep_seeds if experiment.is_sweep and row.reference else preset.seeds


def _common_settings(request: Request, preset: presets.Preset, data: str, method: str = "") -> dict[str, Any]:
    """Keys of `psm pretrain` that all runs on a data set share, or those of a method; the user's win over tuned."""
    own = {row.key for row in settings.rows(ExperimentConfig)}
    of_preset = {k: v for k, v in preset.settings.items() if k not in own}
    keys = dict(request.keys)
    if keys.get("init") is not None and (init := Path(keys["init"]).expanduser()).exists():
        keys["init"] = str(init.resolve())
    of_method = tuned_settings(_tuned(request, preset), data_name(data), method)
    data_keys = {"data": absolute_data(data), "plugins": request.config.plugins}
    return DEVICE_FREE | of_preset | of_method | keys | data_keys


def _tuned(request: Request, preset: presets.Preset) -> Entries:
    """Settings for each data set and method, where the preset or the user asks for them."""
    return read_tuned(request.config.tuned) if preset.tuned or request.config.tuned else {}


def _planned_run(row: Configuration, request: Request, preset: presets.Preset, data: str, seed: int) -> PlannedRun:
    common = _common_settings(request, preset, data, row.settings["method"])
    own = dict(row.settings) | {k: v for k, v in common.items() if k not in row.settings}
    overrides = own | {"seed": seed}
    full = resolved(overrides)
    if row.epochs_share != 1:
        overrides["epochs"] = max(1, round(row.epochs_share * full["epochs"]))
        full = resolved(overrides)
    evaluation = _evaluation_settings(request.config, seed)
    # What a method is tuned to is its own, whether a row or a file says so.
    changed = _changes(full) | _own_keys(own, _common_settings(request, preset, data))
    identity = {k: v for k, v in full.items() if not _about_machine(k) and not _is_off(k, v)}
    words = [data_title(data).lower(), full["method"], *(_slug(k, v) for k, v in changed.items()), f"s{seed}"]
    of_baselines = ("images.", "views.size", "encoder", "stem", "data", "seed", "precision")
    baselines = _hash({k: v for k, v in identity.items() if k.startswith(of_baselines)})
    return PlannedRun(
        name=f"{'-'.join(words)}-{_hash(identity)}",
        title=" ".join([full["method"], *(f"{k}={str(v).lower()}" for k, v in changed.items())]),
        method=full["method"],
        data=data,
        seed=seed,
        settings=overrides | {"epochs": full["epochs"]},
        evaluation=evaluation,
        evaluation_hash=_hash({k: v for k, v in evaluation.items() if not _is_off(k, v)}),
        baselines=f"{data_title(data).lower()}-baselines-s{seed}-{baselines}",
        gradients=row.gradients,
    )


def command_of(name: str, request: Request) -> str:
    """The command that repeats an experiment, without keys about this machine."""
    given = {
        k: v for k, v in request.given.items() if not _about_machine(k) and k.partition(".")[0] not in MACHINE_KEYS
    }
    given = {"preset": request.config.preset} | given
    if given.get("init") is not None:
        given["init"] = Path(given["init"]).name
    if "data" in given:
        given["data"] = [data_name(data) for data in given["data"]]
    if given.get("tuned"):
        given["tuned"] = Path(given["tuned"]).name
    words = [f"{key}={_typed(value)}" for key, value in given.items()]
    return " ".join(["psm experiment run", name, *(shlex.quote(word) if " " in word else word for word in words)])


def _typed(value: Any) -> str:
    """A value as it is typed on the command line."""
    if isinstance(value, (list, tuple)):
        return f"[{','.join(_quoted(_typed(item)) for item in value)}]"
    if value is None or isinstance(value, bool):
        return str(value).lower()
    return str(value)


def _quoted(item: str) -> str:
    """An item of a list; in quotes where a comma would make two of it."""
    return f'"{item}"' if "," in item else item


def absolute_data(data: str) -> str:
    """The name of a published data set or an address, or the absolute path of a folder, a list or shards."""
    return data if data in NAMES or _is_address(data) else str(Path(data).expanduser().resolve())


def data_name(data: str) -> str:
    """A data set's name in results: of a folder without its path, of shards that of their folder."""
    if data in NAMES:
        return data
    if data.startswith("hf:"):
        return data.removeprefix("hf:").partition(":")[0].rstrip("/").rpartition("/")[2]
    path = data if _is_address(data) else _absolute(data)
    folder, _, name = path.rstrip("/").rpartition("/")
    return (folder.rpartition("/")[2] if name.endswith(".tar") else name) or data


def _absolute(data: str) -> str:
    try:
        return str(Path(data).expanduser().resolve())
    except (OSError, RuntimeError, ValueError):  # a name from a damaged file: no such user, a zero byte
        return data


def _is_address(data: str) -> bool:
    """True for what is no path of this machine."""
    return data.startswith("hf:") or "://" in data


def data_title(data: str) -> str:
    """A data set's name on pages."""
    return DATA_TITLES.get(data, data_name(data))


def resolved(overrides: Mapping[str, Any]) -> dict[str, Any]:
    """All keys of `psm pretrain` with their values, those of the method filled in."""
    seed = {"seed": overrides["seed"]} if "seed" in overrides else {}
    return _resolved(json.dumps({k: v for k, v in overrides.items() if k != "seed"})) | seed


@cache
def _resolved(overrides: str) -> dict[str, Any]:
    """``resolved`` without the seed, from JSON: building is slow, and the runs of a row differ in the seed only."""
    from psm.methods.build import method_of
    from psm.training.optim import default_lr

    config = settings.build(PretrainConfig, json.loads(overrides))
    full = replace(config, optim=replace(config.optim, lr=default_lr(config.optim)), **method_of(config).to_dict())
    flat = dict(settings.flatten(settings.to_dict(full)))
    return {key: value for key, value in flat.items() if key != "preset"}  # the suite's own presets decide


def _changes(full: Mapping[str, Any]) -> dict[str, Any]:
    """Settings that differ from those of the method, except the bank's size, which is a matter of scale."""
    from psm.methods import METHODS

    row = dict(settings.flatten(METHODS[full["method"]].spec.to_dict()))
    of_method = {k: v for k, v in full.items() if k.partition(".")[0] in METHOD_GROUPS and k != "bank.size"}
    return {k: v for k, v in of_method.items() if row.get(k) != v}


def _own_keys(own: Mapping[str, Any], common: Mapping[str, Any]) -> dict[str, Any]:
    """Keys of a row beside those of its method, except what is only measured and what all runs have anyway."""
    others = {k: v for k, v in own.items() if k != "method" and not k.startswith("monitor.")}
    others = {k: v for k, v in others.items() if common.get(k) != v}
    return {k: v for k, v in others.items() if k.partition(".")[0] not in METHOD_GROUPS}


def _slug(dotted: str, value: Any) -> str:
    """``k10`` for positives.k=10, ``sampler-none`` for sampler.name=none."""
    group, _, name = dotted.rpartition(".")
    if group in METHOD_GROUPS and name in ("rule", "source", "name"):
        return f"{group}-{value}"
    if isinstance(value, bool):
        return name if value else f"no-{name}"
    return f"{name}{value:g}" if isinstance(value, (int, float)) else f"{name}{value}"


def _evaluation_settings(config: ExperimentConfig, seed: int) -> dict[str, Any]:
    """Keys of `psm evaluate` for a run."""
    keys = {row.key for row in settings.rows(EvaluateConfig) if row.key.startswith(("knn.", "linear."))}
    flat = dict(settings.flatten({"knn": asdict(config.knn), "linear": asdict(config.linear)}))
    return {key: flat[key] for key in sorted(keys)} | {"seed": seed}


def _protocol(request: Request, preset: presets.Preset, data: str) -> str:
    """Hash of the settings that all rows of a table share: scores are compared only within one protocol."""
    full = resolved(_common_settings(request, preset, data))
    full |= _evaluation_settings(request.config, 0)
    if tuned := _tuned(request, preset).get(data_name(data)):
        full["tuned"] = json.dumps(tuned, sort_keys=True)
    shared = {k: v for k, v in full.items() if k not in ("seed", "method", "monitor.purity")}
    return _hash({k: v for k, v in shared.items() if not _about_machine(k) and not _is_off(k, v)})


def _about_machine(dotted: str) -> bool:
    """True for a key that changes no result."""
    return dotted in MAY_CHANGE or dotted.partition(".")[0] in (*MAY_CHANGE, *MACHINE_KEYS)


@cache
def _off_by_default() -> dict[str, Any]:
    from psm.methods.spec import neutral_settings

    defaults = settings.to_dict(PretrainConfig()) | settings.to_dict(EvaluateConfig())
    marked = {row.key for schema in (PretrainConfig, EvaluateConfig) for row in settings.rows(schema) if row.neutral}
    off = {k: v for k, v in settings.flatten(defaults) if v is None or v is False or v == [] or k in marked}
    return neutral_settings() | off


def _is_off(dotted: str, value: Any) -> bool:
    """True for a key left at a default that changes nothing: new keys of a later version then rename no run.

    These are defaults of none, false or [], and those that are marked as neutral.
    """
    return dotted in _off_by_default() and value == _off_by_default()[dotted]


def _hash(values: Mapping[str, Any]) -> str:
    text = json.dumps(values, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=5).hexdigest()
