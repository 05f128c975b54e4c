"""The typed settings of a method beside its parts. The defaults are PSM's."""

from dataclasses import dataclass

from psm.config.parts import setting
from psm.losses.method_loss import REDUCTIONS
from psm.mining.memory_bank import INDEXES
from psm.utils.schedule import MOMENTUM_SCHEDULES

BANK_KEYS = ("view", "mean")


@dataclass(frozen=True)
class LossSettings:
    """How the terms of the loss add up."""

    temperature: float = setting(0.5, "t, what similarities are divided by", above=0)
    soft_weight: float = setting(1.0, "weight of the method's own term (PSM: L_soft, eq. 6); 0 drops it", at_least=0)
    hard_weight: float = setting(1.0, "lambda, weight of L_hard (eq. 4, 7) beside it; 0 drops it", at_least=0)
    symmetric: bool = setting(True, "mean of both directions between the views; false: view 1 to view 2 alone")
    reduction: str = setting(
        "mean", "of the two directions between views: mean, or sum, twice as much", choices=REDUCTIONS, neutral=True
    )
    weight_sum: float = setting(
        0.0,
        "scale the loss so that its weights, of all positives in both terms, sum to this (PSM's: 3); 0: as they are",
        at_least=0,
        neutral=True,
    )
    redundancy_weight: float = setting(
        0.0,
        "weight of All4One's redundancy term (there 5): dimensions correlate with no other",
        at_least=0,
        neutral=True,
    )


@dataclass(frozen=True)
class BankSettings:
    """The memory bank that samples are mined from."""

    size: int = setting(16384, "rows in the bank", at_least=1)
    index: str = setting("exact", "exact, or faiss: an approximate search, for large banks on a CPU", choices=INDEXES)
    keys: str = setting(
        "view",
        "what is stored and searched with: view, the key of the second view and of each query's other view; mean, the "
        "mean of the keys of an image's views",
        choices=BANK_KEYS,
        neutral=True,
    )
    allow_self: bool = setting(False, "let a query meet stale copies of its own image there")
    sharded: bool = setting(
        False, "each process holds and searches its share of the rows; same results, for large banks", neutral=True
    )


@dataclass(frozen=True)
class TargetSettings:
    """The target network, a moving average of the online one, which makes the keys."""

    enabled: bool = setting(True, "keys come from a target network; false: from the online network")
    momentum: float = setting(0.99, "share of itself that the target keeps at each step (EMA)", at_least=0, at_most=1)
    schedule: str = setting(
        "constant",
        "constant, or cosine: the momentum rises from its value to 1 at the last step",
        choices=MOMENTUM_SCHEDULES,
        neutral=True,
    )
    views: str = setting(
        "same",
        "what the target sees: same, the views of the online network; weak, the same crops and flips without color "
        "changes, blur and solarization",
        choices=("same", "weak"),
        neutral=True,
    )


@dataclass(frozen=True)
class PredictorSettings:
    """The predictor, which makes queries from online projections."""

    enabled: bool = setting(True, "queries are predictions of the other view's projection")
    hidden_dim: int = setting(0, "width of its hidden layer; 0: heads.hidden_dim", at_least=0, neutral=True)
    lr_factor: float = setting(1.0, "its learning rate over that of the other networks", above=0, neutral=True)
