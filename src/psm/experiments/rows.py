"""The rows that experiments are made of: configurations, and PSM or another method with some keys changed."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Configuration:
    """One row of a table or one point of a figure: a title and the settings of its runs."""

    title: str
    settings: Mapping[str, Any]  # keys of `psm pretrain`
    reference: str | None = None  # title of the row that it is compared with
    value: float | None = None  # position on the axis of a sweep
    gradients: bool = False  # measure the gradients of figure 2 on its runs
    highlight: bool = False  # draw it in the highlight color
    group: str = ""  # of a grid: what one of its rows is chosen for
    series: str = ""  # of a grid or schedules: the row without its position on the axis
    shared: bool = False  # of a grid: the settings that all methods share
    epochs_share: float = 1.0  # of the preset's epochs that its runs have


@dataclass(frozen=True)
class Experiment:
    """One table or figure of the paper."""

    name: str
    title: str
    question: str
    kind: str  # table, purity, gradients, bars, sweep, grid or schedules
    configurations: tuple[Configuration, ...]
    data: tuple[str, ...]  # data sets, as in the paper
    axis: str = ""  # axis label of a sweep
    claim: str = ""  # the paper's claim, in words
    note: str = ""  # shown below the results
    in_all: bool = True  # part of `all`: the paper's tables and figures
    seeds: tuple[int, ...] | None = None  # of all rows, whatever the preset says
    # The paper's numbers: data -> title -> (top-1, top-5) of the linear protocol.
    paper: Mapping[str, Mapping[str, tuple[float, float]]] = field(default_factory=dict)

    @property
    def is_sweep(self) -> bool:
        """True if each point may be a single run, judged by the spread of the reference over seeds."""
        return self.kind in ("bars", "sweep")


CIFAR = ("cifar10", "cifar100")
ALL_DATA = (*CIFAR, "tiny-imagenet")

# The methods as tables name them.
TITLES = {
    "simclr": "SimCLR",
    "mocov2": "MoCo v2",
    "byol": "BYOL",
    "vicreg": "VICReg",
    "mochi": "MoCHi",
    "dcl": "DCL",
    "hcl": "HCL",
    "bcl": "BCL",
    "nnclr": "NNCLR",
    "snclr": "SNCLR",
    "psm": "PSM",
    "psmv2": "PSM v2",
}

# Settings are chosen on these images and with this seed, which no table of test scores has.
TRIAL_SEED = 100
TRIAL_HOLDOUT = 0.1

# Settings that several experiments share, so that they share the run. Methods that mine positives record their purity.
PURITY = {"monitor.purity": True}
_MINES_POSITIVES = ("snclr", "psm", "psmv2")
_PSM = {"method": "psm", **PURITY}

# With batch norm a factor in the loss is a factor in the learning rate: rows that change the weights keep their sum.
PSM_WEIGHTS = 3.0  # the key and its mined rows in L_soft weigh 2, the key in L_hard 1
EQUAL_SUM: dict[str, Any] = {"loss__weight_sum": PSM_WEIGHTS}
EQUAL_SUM_NOTE = "All rows at the same sum of weights, PSM's 3, so that they do not differ in their step size."


def psm_row(title: str, reference: str | None = None, value: float | None = None, **changes: Any) -> Configuration:
    """PSM with some keys changed (``positives__k=10`` for positives.k)."""
    named = {k.replace("__", "."): v for k, v in changes.items()}
    return Configuration(title, _PSM | named, reference, value, highlight=not changes)


def method_row(title: str, name: str, reference: str | None = None, **changes: Any) -> Configuration:
    """A method by name with some keys changed."""
    base = {"method": name, **(PURITY if name in _MINES_POSITIVES else {})}
    named = {k.replace("__", "."): v for k, v in changes.items()}
    return Configuration(
        title,
        base | named,
        reference,
        gradients=name == "mocov2" and not changes,
        highlight=name == "psm" or bool(changes),
    )


def successor_row(title: str, reference: str | None = None, **changes: Any) -> Configuration:
    """PSM v2 with some keys changed."""
    named = {k.replace("__", "."): v for k, v in changes.items()}
    return Configuration(title, {"method": "psmv2", **PURITY} | named, reference, highlight=not changes)
