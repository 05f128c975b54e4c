"""The methods, a row each: a method is a composition of positives, negatives, objective, bank and target."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from psm.config import (
    RULES,
    WEIGHTINGS,
    BankConfig,
    LossConfig,
    NegativesConfig,
    PositivesConfig,
    TargetConfig,
)
from psm.errors import UserError


@dataclass(frozen=True)
class Composition:
    """The parts of a method with their settings. Those of a method's row are complete: nothing is None."""

    positives: PositivesConfig = field(default_factory=PositivesConfig)
    negatives: NegativesConfig = field(default_factory=NegativesConfig)
    bank: BankConfig = field(default_factory=BankConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    target: TargetConfig = field(default_factory=TargetConfig)

    @property
    def mines(self) -> bool:
        """Whether positives are mined, that is whether a bank is searched."""
        return self.positives.rule == "neighbours" and self.positives.k > 0 and self.loss.soft > 0


@dataclass(frozen=True)
class Method:
    """One row of the table of methods."""

    name: str
    title: str
    reference: str
    composition: Composition


_psm = Composition(
    positives=PositivesConfig(rule="neighbours", k=5, weighting="V0", own=False),
    negatives=NegativesConfig(pnsm=True, a=0.5),
    bank=BankConfig(size=16384),
    loss=LossConfig(temperature=0.5, soft=1.0, hard=1.0, symmetric=True),
    target=TargetConfig(momentum=0.99),
)

METHODS: dict[str, Method] = {
    row.name: row
    for row in (
        Method(
            "psm",
            "PSM: mined positives beside the key, mined negatives",
            "Dong, Long, Li: Rethinking Samples Selection for Contrastive Learning: Mining of Potential Samples",
            _psm,
        ),
        Method(
            "snclr",
            "SNCLR: soft neighbours as positives, all negatives",
            "Ge et al.: Soft Neighbors are Positive Supporters in Contrastive Visual Representation Learning (2023)",
            replace(
                _psm,
                negatives=replace(_psm.negatives, pnsm=False),
                loss=replace(_psm.loss, hard=0.0),
            ),
        ),
    )
}


def find(name: str) -> Method:
    """The row of that name."""
    if name not in METHODS:
        near = difflib.get_close_matches(name, METHODS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else "see `psm methods`."
        raise UserError(f"method={name} is unknown: choose one of {', '.join(METHODS)}; {hint}")
    return METHODS[name]


def compose(method: str, wishes: Mapping[str, Any] | None = None) -> Composition:
    """The method's composition with the user's wishes put in: groups by name, each None where nothing is wished."""
    row = find(method).composition
    groups = {}
    for group in fields(Composition):
        wish = (wishes or {}).get(group.name)
        given = (
            {f.name: getattr(wish, f.name) for f in fields(wish) if getattr(wish, f.name) is not None} if wish else {}
        )
        groups[group.name] = replace(getattr(row, group.name), **given)
    composition = Composition(**groups)
    _check(composition)
    return composition


def _check(composition: Composition) -> None:
    """Refuse, in a sentence, what makes no sense."""
    positives, negatives, loss = composition.positives, composition.negatives, composition.loss
    rules = (
        (positives.rule in RULES, f"positives.rule={positives.rule} is unknown: choose one of {', '.join(RULES)}."),
        (
            positives.weighting in WEIGHTINGS,
            f"positives.weighting={positives.weighting} is unknown: choose one of {', '.join(WEIGHTINGS)}.",
        ),
        (positives.k >= 0, f"positives.k={positives.k} must be 0 (nothing is mined) or more."),
        (negatives.a >= 0, f"negatives.a={negatives.a} must be 0 (every negative is kept) or more."),
        (loss.temperature > 0, f"loss.temperature={loss.temperature} must be above 0; the paper uses 0.5."),
        (loss.soft >= 0, f"loss.soft={loss.soft} must be 0 (without L_soft) or more."),
        (loss.hard >= 0, f"loss.hard={loss.hard} must be 0 (without L_hard) or more."),
        (loss.soft + loss.hard > 0, "loss.soft=0 and loss.hard=0 leave nothing to learn from: keep one of them."),
        (
            0 <= composition.target.momentum <= 1,
            f"target.momentum={composition.target.momentum} must lie between 0 and 1; the paper uses 0.99.",
        ),
        (composition.bank.size >= 1, f"bank.size={composition.bank.size} must be 1 or more; the paper uses 16384."),
        (
            not composition.mines or composition.bank.size >= positives.k,
            f"bank.size={composition.bank.size} is smaller than positives.k={positives.k}, so nothing could ever be "
            "mined: give a larger bank or a smaller k.",
        ),
    )
    for holds, otherwise in rules:
        if not holds:
            raise UserError(otherwise)
