"""What may follow in a command line: commands, keys, values and paths, from the tables that ``--help`` shows."""

from collections.abc import Iterable
from importlib import import_module
from pathlib import Path

from psm.config.completion import SHELLS
from psm.config.evaluation import SCORES
from psm.config.keys import Row, rows
from psm.config.presets import PRETRAIN_PRESETS

# Values that are names of registered things. Their registries import torch, which is slow for a key press; tests
# compare the two.
METHODS = ["psm", "simclr", "mocov2", "byol", "vicreg", "mochi", "dcl", "hcl", "bcl", "nnclr", "snclr", "psmv2"]
PARTS = {
    "positives": ["view", "nn", "knn"],
    "negatives": ["views", "positives", "queries", "bank", "mochi", "none"],
    "sampler": ["none", "pnsm"],
    "weighting": ["sum", "debiased", "hard", "bayesian"],
    "objective": ["contrastive", "decoupled", "byol", "vicreg"],
}
NAMED = {
    "method": METHODS,
    "methods": METHODS,
    "data": ["shapes", "cifar10", "cifar100", "tiny-imagenet"],
    "encoder": ["tiny", "resnet18", "resnet34", "resnet50", "torchvision/", "timm/"],
    "format": ["onnx", "torchscript", "torch-export", "torchvision", "timm", "safetensors", "hf"],
    "scores": [*SCORES, "all"],
    "resume": ["true", "auto", "false"],
    "accelerator": ["auto", "cpu", "gpu", "mps", "tpu"],
    "precision": ["32-true", "bf16-mixed", "16-mixed"],
    **PARTS,
}


def candidates(line: str, commands: Iterable[str]) -> list[str]:
    """Completions of the last word of a command line.

    Args:
        line: the line up to the cursor; its first word is the program.
        commands: names of all commands.

    Returns:
        Whole words. One that ends in ``=``, ``.`` or ``/`` wants more after it.
    """
    words = line.split(" ")
    before, word = [part for part in words[1:-1] if part], words[-1] if len(words) > 1 else ""
    if not before:
        return _starting(word, [*commands, "--help", "--version"])
    name, *given = before
    if name not in set(commands):
        return []
    table = _keys(name)
    if given and given[-1] == "--help":
        groups = [row.topic or key.partition(".")[0] for key, row in table.items() if row.topic or "." in key]
        return _starting(word, [*dict.fromkeys(groups), "all", *table])
    key, equals, value = word.partition("=")
    if equals:
        return [f"{key}={found}" for found in _values(name, key, value, table)]
    set_already = {part.partition("=")[0] for part in given}
    free = [one for one in table if one not in set_already]
    found = [*_words(name, given), *(f"{one}=" for one in (*free, "config")), "--help"]
    return _starting(word, found) or _paths(word)


def _starting(start: str, words: Iterable[str]) -> list[str]:
    return [word for word in words if word.startswith(start)]


def _keys(name: str) -> dict[str, Row]:
    """The keys of a command, and those that it passes on."""
    schema = import_module(f"psm.cli.{name}").Config
    table = {row.key: row for row in rows(schema)}
    if name == "experiment":
        from psm.config.schema import PretrainConfig
        from psm.experiments.plan import RESERVED

        table |= {row.key: row for row in rows(PretrainConfig) if row.key not in (*RESERVED, *table)}
    return table


def _words(name: str, given: list[str]) -> list[str]:
    """Words of a command that are no keys."""
    if name in ("runs", "completion"):
        return [] if given else {"runs": ["list", "best", "compare", "serve"], "completion": list(SHELLS)}[name]
    if name != "experiment":
        return []
    from psm.experiments.catalog import EXPERIMENTS

    if not given:
        return ["list", "run", "report"]
    return [] if given[0] == "list" else [one for one in (*EXPERIMENTS, "all") if one not in given]


def _values(name: str, key: str, start: str, table: dict[str, Row]) -> list[str]:
    """Values of a key that begin with ``start``; paths where it takes any text."""
    row = table.get(key)
    if row is None and key != "config":
        return []
    known = _known_values(name, key, row)
    if not start.startswith("[") or row is None:
        paths = row is None or (str in row.kinds and (not known or key == "data"))
        return _starting(start, known) + (_paths(start) if paths else [])
    done, comma, last = start.rpartition(",")  # within a list
    lead = f"{done}{comma}" if comma else "["
    return [f"{lead}{found}" for found in _starting(last if comma else start[1:], known)]


def _known_values(name: str, key: str, row: Row | None) -> list[str]:
    if row is None:
        return []
    if key == "preset":
        from psm.experiments.presets import PRESETS

        return list(PRESETS) if name == "experiment" else ["auto", *PRETRAIN_PRESETS]
    if key in NAMED:
        return NAMED[key]
    if bool in row.kinds:
        return ["true", "false", *(["none"] if row.optional else [])]
    return list(row.bounds.choices)


def _paths(start: str) -> list[str]:
    """Files and folders that begin with ``start``."""
    folder, name = (start.rpartition("/")[0] or "/", start.rpartition("/")[2]) if "/" in start else ("", start)
    lead = "" if not folder else f"{folder.rstrip('/')}/"
    try:
        entries = sorted(Path(folder or ".").expanduser().iterdir())
    except OSError:
        return []
    shown = [entry for entry in entries if entry.name.startswith(name) and (name or not entry.name.startswith("."))]
    return [f"{lead}{entry.name}{'/' if entry.is_dir() else ''}" for entry in shown[:200]]
