"""A method as a composition of parts, complete and checked."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from typing import Any

from torch import Tensor

from psm.config.parts import PartRegistry, check_value
from psm.losses.contrastive import ContrastiveLoss
from psm.losses.negative_weighting import WEIGHTINGS, NegativeWeighting, Sum
from psm.losses.objectives import OBJECTIVES, Contrastive, Objective, ProjectionObjective
from psm.methods.settings import BankSettings, LossSettings, PredictorSettings, TargetSettings
from psm.mining.negatives import NEGATIVES, NegativeSource, PositiveNegatives
from psm.mining.pnsm import PNSM, SAMPLERS, NegativeSampler
from psm.mining.positives import POSITIVES, NeighborPositives, PositiveRule
from psm.models.outputs import mean_keys
from psm.utils.errors import UserError, did_you_mean

KINDS: dict[str, PartRegistry[Any]] = {
    registry.kind: registry for registry in (POSITIVES, NEGATIVES, SAMPLERS, WEIGHTINGS, OBJECTIVES)
}


@dataclass(frozen=True)
class MethodSpec:
    """The parts of a method with their settings. The defaults are PSM's."""

    positives: PositiveRule = field(default_factory=NeighborPositives)
    negatives: NegativeSource = field(default_factory=PositiveNegatives)
    sampler: NegativeSampler = field(default_factory=PNSM)
    weighting: NegativeWeighting = field(default_factory=Sum)
    objective: Objective = field(default_factory=Contrastive)
    loss: LossSettings = field(default_factory=LossSettings)
    bank: BankSettings = field(default_factory=BankSettings)
    target: TargetSettings = field(default_factory=TargetSettings)
    predictor: PredictorSettings = field(default_factory=PredictorSettings)

    @property
    def num_mined(self) -> int:
        """How many positives are mined from the bank for a query."""
        return self.positives.num_mined if self.loss.soft_weight > 0 else 0

    @property
    def needs_bank(self) -> bool:
        """True if anything is mined from the bank."""
        return self.num_mined > 0 or (self.loss.soft_weight > 0 and self.negatives.needs_bank)

    @property
    def mines_by_mean(self) -> bool:
        """True if the bank holds, and is searched with, the mean of the keys of an image's views."""
        return self.needs_bank and self.bank.keys == "mean"

    def bank_keys(self, key: Tensor) -> Tensor:
        """What the bank is given of the keys (V, N, D): those of view 2, or the mean over the views; (N, D)."""
        return mean_keys(key) if self.mines_by_mean else key[1].detach()

    def build_loss(self) -> ContrastiveLoss | ProjectionObjective:
        """The loss of one direction, or the objective over projections."""
        if isinstance(self.objective, ProjectionObjective):
            return self.objective
        return ContrastiveLoss(
            self.positives,
            self.negatives,
            self.sampler,
            self.weighting,
            self.objective,
            temperature=self.loss.temperature,
            soft_weight=self.loss.soft_weight,
            hard_weight=self.loss.hard_weight,
            weight_sum=self.loss.weight_sum,
            allow_self=self.bank.allow_self,
            detach_keys=self.target.enabled or self.predictor.enabled,
        )

    @cached_property
    def criterion(self) -> ContrastiveLoss | ProjectionObjective:
        """The loss, built once."""
        return self.build_loss()

    @property
    def metric_names(self) -> tuple[str, ...]:
        """Names of the metrics that the loss comes with."""
        names = self.criterion.metric_names if isinstance(self.criterion, ContrastiveLoss) else ()
        return (*names, *(("redundancy",) if self.loss.redundancy_weight else ()))

    @property
    def loss_options(self) -> dict[str, Any]:
        """What ``method_loss`` is told beside the criterion: how directions add up, and terms beside them."""
        loss = self.loss
        return {
            "symmetric": loss.symmetric,
            "reduction": loss.reduction,
            "redundancy_weight": loss.redundancy_weight,
            "mine_by_mean": self.mines_by_mean,
        }

    def override(self, overrides: Mapping[str, Any]) -> "MethodSpec":
        """A copy with some parts or settings changed, checked.

        Args:
            overrides: by group: settings as a mapping or dataclass (None where silent), a part's name, or a part.
        """
        known = {f.name for f in fields(self)}
        for name in overrides:
            if name not in known:
                raise UserError(f"{name!r} is no part of a method{did_you_mean(name, known)}: {', '.join(known)}.")
        changed = {name: self._overridden(name, given) for name, given in overrides.items() if given is not None}
        spec = replace(self, **changed)
        spec.validate()
        return spec

    def _overridden(self, name: str, given: Any) -> Any:
        now = getattr(self, name)
        if name in KINDS:
            return KINDS[name].build(given, now)
        if isinstance(given, type(now)):
            return given
        if not isinstance(given, Mapping):
            given = asdict(given)
        return override_settings(name, now, given)

    def to_dict(self) -> dict[str, Any]:
        """Nested plain values; ``override`` reads them back."""
        groups = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: KINDS[name].to_dict(group) if name in KINDS else asdict(group) for name, group in groups.items()}

    def validate(self) -> None:
        """Refuse, in a sentence, what makes no sense."""
        for group in ("loss", "bank", "target", "predictor"):
            override_settings(group, getattr(self, group), asdict(getattr(self, group)))
        for problem in self._problems():
            raise UserError(problem)

    def _problems(self) -> Iterator[str]:
        loss, bank = self.loss, self.bank
        if loss.soft_weight + loss.hard_weight <= 0:
            yield "loss.soft_weight=0 and loss.hard_weight=0 leave nothing to learn from: keep one of them."
        for kind in KINDS:
            yield from getattr(self, kind).validate(self)
        if not self.predictor.enabled and (self.predictor.hidden_dim or self.predictor.lr_factor != 1):
            yield (
                "predictor.hidden_dim and predictor.lr_factor are about a predictor, and there is none: give "
                "predictor.enabled=true."
            )
        if self.target.schedule != "constant" and not self.target.enabled:
            yield f"target.schedule={self.target.schedule} has no target network to slow: give target.enabled=true."
        if self.target.views == "weak" and not self.target.enabled:
            yield "target.views=weak is about what a target network sees, and there is none: give target.enabled=true."
        if bank.keys == "mean" and getattr(self.positives, "agree", False):
            yield (
                "positives.agree=true compares what the views of an image mine, and with bank.keys=mean they mine the "
                "same: leave one of them out."
            )
        if bank.sharded and bank.index != "exact":
            yield f"bank.sharded=true is for the exact search: leave bank.index={bank.index} out."
        if bank.sharded and self.negatives.needs_bank:
            yield (
                f"bank.sharded=true shares the search for positives, and negatives.source={self.negatives.part_name} "
                "compares with every row: leave it out."
            )
        if bank.index != "exact" and not self.num_mined:
            yield f"bank.index={bank.index} searches the bank for positives, and none are mined as set: leave it out."
        if self.num_mined > bank.size:
            yield (
                f"bank.size={bank.size} is smaller than positives.k={self.num_mined}, so nothing could ever be mined: "
                "give a larger bank or a smaller k."
            )


def neutral_settings() -> dict[str, Any]:
    """Settings of the typed groups and of all registered parts whose default changes nothing, by dotted key."""
    typed = {name: [type(getattr(MethodSpec(), name))] for name in ("loss", "bank", "target", "predictor")}
    parts = {name: [kind.find(part) for part in kind] for name, kind in KINDS.items()}
    return {
        f"{group}.{f.name}": f.default
        for group, classes in (typed | parts).items()
        for cls in classes
        for f in fields(cls)
        if f.metadata.get("neutral")
    }


def override_settings(group: str, now: Any, given: Mapping[str, Any]) -> Any:
    """Settings of a typed group with some of them changed, each checked."""
    known = {f.name: f for f in fields(now)}
    for name in given:
        if name not in known:
            raise UserError(f"{group}.{name} is unknown{did_you_mean(name, known)}: {group} has {', '.join(known)}.")
    changes = {
        name: check_value(f"{group}.{name}", value, type(getattr(now, name)), known[name].metadata)
        for name, value in given.items()
        if value is not None
    }
    return replace(now, **changes)
