"""The methods, a row each: a method is a composition of positives, negatives, objective, bank and target."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from psm.config.schema import (
    INDEXES,
    MASSES,
    OBJECTIVES,
    RULES,
    SOURCES,
    WEIGHTINGS,
    BankConfig,
    LossConfig,
    NegativesConfig,
    PositivesConfig,
    TopologyConfig,
)
from psm.utils.errors import UserError, did_you_mean


@dataclass(frozen=True)
class Composition:
    """The parts of a method with their settings. Those of a method's row are complete: nothing is None."""

    topology: TopologyConfig = field(default_factory=TopologyConfig)
    positives: PositivesConfig = field(default_factory=PositivesConfig)
    negatives: NegativesConfig = field(default_factory=NegativesConfig)
    bank: BankConfig = field(default_factory=BankConfig)
    loss: LossConfig = field(default_factory=LossConfig)

    @property
    def mined(self) -> int:
        """How many positives are mined from the bank for a query."""
        each = {"key": 0, "nearest": 1, "neighbors": self.positives.k}.get(self.positives.rule, 0)
        return each if self.loss.soft > 0 else 0

    @property
    def mines(self) -> bool:
        """Whether positives are mined."""
        return self.mined > 0

    @property
    def needs_bank(self) -> bool:
        """Whether anything is mined from the bank."""
        return self.mines or (self.loss.soft > 0 and self.negatives.source == "bank")


@dataclass(frozen=True)
class Method:
    """One row of the table of methods."""

    name: str
    title: str
    reference: str
    composition: Composition


METHODS: dict[str, Method] = {}


def register(name: str, title: str, reference: str, base: str | None = None, **parts: dict[str, Any]) -> Method:
    """Add a method: a base method (psm by default) with some settings of its parts changed.

    >>> register("psm2", "PSM with two neighbors", "here", positives={"k": 2})  # doctest: +SKIP
    """
    row = METHODS[base].composition if base else _PSM
    changed = {part: replace(getattr(row, part), **settings) for part, settings in parts.items()}
    METHODS[name] = Method(name, title, reference, replace(row, **changed))
    check(METHODS[name].composition)
    return METHODS[name]


def find(name: str) -> Method:
    """The row of that name."""
    if name not in METHODS:
        hint = did_you_mean(name, METHODS)
        raise UserError(f"method={name} is unknown{hint}: choose one of {', '.join(METHODS)}; see `psm methods`.")
    return METHODS[name]


def compose(method: str, overrides: Mapping[str, Any] | None = None) -> Composition:
    """The method's composition with the user's overrides put in: groups by name, each None where nothing is wished."""
    row = find(method).composition
    groups = {}
    for group in fields(Composition):
        override = (overrides or {}).get(group.name)
        given = (
            {f.name: getattr(override, f.name) for f in fields(override) if getattr(override, f.name) is not None}
            if override
            else {}
        )
        groups[group.name] = replace(getattr(row, group.name), **given)
    composition = Composition(**groups)
    check(composition)
    return composition


def check(composition: Composition) -> None:
    """Refuse, in a sentence, what makes no sense."""
    topology, positives, negatives = composition.topology, composition.positives, composition.negatives
    bank, loss = composition.bank, composition.loss
    objective, contrasts = loss.objective, loss.objective == "contrastive"

    def known(name: str, value: str, allowed: tuple[str, ...]) -> tuple[bool, str]:
        return value in allowed, f"{name}={value} is unknown: choose one of {', '.join(allowed)}."

    def between(name: str, value: float, low: float, high: float, advice: str = "") -> tuple[bool, str]:
        return low <= value <= high, f"{name}={value} must lie between {low:g} and {high:g}{advice}."

    def at_least(name: str, value: float, least: float, meaning: str) -> tuple[bool, str]:
        return value >= least, f"{name}={value} must be {least:g} ({meaning}) or more."

    rules = (
        known("loss.objective", objective, OBJECTIVES),
        known("positives.rule", positives.rule, RULES),
        known("positives.weighting", positives.weighting, WEIGHTINGS),
        known("negatives.source", negatives.source, SOURCES),
        known("negatives.mass", negatives.mass, MASSES),
        at_least("positives.k", positives.k, 0, "nothing is mined"),
        at_least("negatives.a", negatives.a, 0, "every negative is kept"),
        at_least("negatives.hardest", negatives.hardest, 1, "the hardest alone"),
        at_least("negatives.mixed", negatives.mixed, 0, "none"),
        at_least("negatives.mixed_query", negatives.mixed_query, 0, "none"),
        at_least("negatives.beta", negatives.beta, 0, "hard negatives count as any"),
        at_least("loss.soft", loss.soft, 0, "without the method's own term"),
        at_least("loss.hard", loss.hard, 0, "without L_hard"),
        at_least("bank.size", bank.size, 1, "one row"),
        known("bank.index", bank.index, INDEXES),
        (
            bank.index == "exact" or composition.mines,
            f"bank.index={bank.index} finds positives in the bank, and none are mined from it as set: leave it out.",
        ),
        between("topology.momentum", topology.momentum, 0, 1, "; the paper uses 0.99"),
        between("negatives.tau", negatives.tau, 0, 0.99),
        between("negatives.alpha", negatives.alpha, 0, 1),
        (loss.temperature > 0, f"loss.temperature={loss.temperature} must be above 0; the paper uses 0.5."),
        (loss.soft + loss.hard > 0, "loss.soft=0 and loss.hard=0 leave nothing to learn from: keep one of them."),
        (
            negatives.mass != "bayesian" or negatives.beta <= 1,
            f"negatives.beta={negatives.beta} must be 1 or less with negatives.mass=bayesian.",
        ),
        (
            not contrasts or negatives.source != "none" or not loss.soft,
            "negatives.source=none leaves a contrastive objective nothing to contrast with: choose another source, or "
            "loss.objective=regression.",
        ),
        (
            contrasts or negatives.source == "none",
            f"loss.objective={objective} has no negatives: leave negatives.source at none.",
        ),
        (contrasts or not negatives.pnsm, f"loss.objective={objective} has no negatives for negatives.pnsm to mine."),
        (contrasts or not loss.hard, f"loss.hard={loss.hard} is a contrastive term: give loss.objective=contrastive."),
        (
            objective != "regression" or topology.target or topology.predictor,
            "loss.objective=regression collapses without a target or a predictor: give topology.target=true.",
        ),
        (
            objective != "variance-covariance" or not (topology.target or topology.predictor),
            "loss.objective=variance-covariance compares projections of one network: give topology.target=false and "
            "topology.predictor=false.",
        ),
        (
            objective != "variance-covariance" or positives.rule == "key",
            f"positives.rule={positives.rule} has no place in loss.objective=variance-covariance: leave it at key.",
        ),
        (
            negatives.source != "queries" or positives.rule != "neighbors",
            "negatives.source=queries compares one positive with all queries: give positives.rule=nearest or key.",
        ),
        (
            negatives.source == "bank" or not negatives.mixed + negatives.mixed_query,
            f"negatives.mixed mixes rows of the bank, and negatives.source={negatives.source}: give "
            "negatives.source=bank or negatives.mixed=0 negatives.mixed_query=0.",
        ),
        (
            not composition.mines or positives.rule != "neighbors" or bank.size >= positives.k,
            f"bank.size={bank.size} is smaller than positives.k={positives.k}, so nothing could ever be mined: give a "
            "larger bank or a smaller k.",
        ),
    )
    for holds, otherwise in rules:
        if not holds:
            raise UserError(otherwise)


_PSM = Composition(
    topology=TopologyConfig(target=True, momentum=0.99, predictor=True),
    positives=PositivesConfig(rule="neighbors", k=5, weighting="V0"),
    negatives=NegativesConfig(
        source="positives",
        pnsm=True,
        a=0.5,
        mass="sum",
        tau=0.1,
        alpha=0.9,
        beta=1.0,
        hardest=1024,
        mixed=0,
        mixed_query=0,
    ),
    bank=BankConfig(size=16384, index="exact", own=False),
    loss=LossConfig(
        objective="contrastive",
        temperature=0.5,
        soft=1.0,
        hard=1.0,
        invariance=25.0,
        variance=25.0,
        covariance=1.0,
        symmetric=True,
    ),
)

register(
    "psm",
    "PSM: the key and mined positives, mined negatives",
    "Dong, Long, Li: Rethinking Samples Selection for Contrastive Learning: Mining of Potential Samples",
)
register(
    "snclr",
    "SNCLR: soft neighbors as positives",
    "Ge et al.: Soft Neighbors are Positive Supporters in Contrastive Visual Representation Learning (2023)",
    negatives={"pnsm": False},
    loss={"hard": 0.0},
)
register(
    "simclr",
    "SimCLR: the other view against both views of the other images",
    "Chen et al.: A Simple Framework for Contrastive Learning of Visual Representations (2020)",
    topology={"target": False, "predictor": False},
    positives={"rule": "key"},
    negatives={"source": "views", "pnsm": False},
    loss={"hard": 0.0},
)
register(
    "dcl",
    "DCL (debiased): SimCLR with false negatives taken off the mass",
    "Chuang et al.: Debiased Contrastive Learning (2020)",
    base="simclr",
    negatives={"mass": "debiased"},
)
register(
    "hcl",
    "HCL: DCL with hard negatives weighing more",
    "Robinson et al.: Contrastive Learning with Hard Negative Samples (2021)",
    base="simclr",
    negatives={"mass": "hard"},
)
register(
    "bcl",
    "BCL: SimCLR with negatives weighed by the probability that they are true and hard",
    "Liu, Wang: Bayesian Self-Supervised Contrastive Learning (2023)",
    base="simclr",
    negatives={"mass": "bayesian", "beta": 0.9},
)
register(
    "mocov2",
    "MoCo v2: the key against a bank of earlier keys",
    "Chen et al.: Improved Baselines with Momentum Contrastive Learning (2020)",
    topology={"predictor": False},
    positives={"rule": "key"},
    negatives={"source": "bank", "pnsm": False},
    bank={"own": True},
    loss={"hard": 0.0},
)
register(
    "mochi",
    "MoCHi: MoCo v2 with synthetic hard negatives",
    "Kalantidis et al.: Hard Negative Mixing for Contrastive Learning (2020)",
    base="mocov2",
    negatives={"mixed": 1024, "mixed_query": 128},
)
register(
    "nnclr",
    "NNCLR: the key's nearest bank row instead of the key",
    "Dwibedi et al.: With a Little Help from My Friends (2021)",
    topology={"target": False},
    positives={"rule": "nearest"},
    negatives={"source": "queries", "pnsm": False},
    loss={"hard": 0.0},
)
register(
    "byol",
    "BYOL: predict the key, no negatives",
    "Grill et al.: Bootstrap Your Own Latent (2020)",
    positives={"rule": "key"},
    negatives={"source": "none", "pnsm": False},
    loss={"objective": "regression", "hard": 0.0},
)
register(
    "vicreg",
    "VICReg: close views, spread and decorrelated dimensions",
    "Bardes, Ponce, LeCun: VICReg (2022)",
    topology={"target": False, "predictor": False},
    positives={"rule": "key"},
    negatives={"source": "none", "pnsm": False},
    loss={"objective": "variance-covariance", "hard": 0.0},
)
