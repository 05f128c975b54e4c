"""psm: learn image encoders from unlabeled images by contrastive learning with mined samples."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from psm.evaluation.evaluate import evaluate
    from psm.losses.contrastive import ContrastiveLoss
    from psm.losses.method_loss import method_loss
    from psm.losses.negative_weighting import NegativeWeighting
    from psm.losses.objectives import Objective
    from psm.methods import get_method, list_methods, register_method, register_part
    from psm.mining.memory_bank import MemoryBank
    from psm.mining.negatives import NegativeSource
    from psm.mining.pnsm import NegativeSampler, keep_probability, mine_negatives
    from psm.mining.positives import PositiveRule
    from psm.models.pretrained import load_encoder
    from psm.reporting.inspector import inspect
    from psm.training.pretrain import pretrain

# Imported when first used: `psm --help` answers without torch.
_HOMES = {
    "ContrastiveLoss": "psm.losses.contrastive",
    "MemoryBank": "psm.mining.memory_bank",
    "evaluate": "psm.evaluation.evaluate",
    "get_method": "psm.methods",
    "inspect": "psm.reporting.inspector",
    "keep_probability": "psm.mining.pnsm",
    "list_methods": "psm.methods",
    "load_encoder": "psm.models.pretrained",
    "method_loss": "psm.losses.method_loss",
    "mine_negatives": "psm.mining.pnsm",
    "NegativeSampler": "psm.mining.pnsm",
    "NegativeSource": "psm.mining.negatives",
    "NegativeWeighting": "psm.losses.negative_weighting",
    "Objective": "psm.losses.objectives",
    "PositiveRule": "psm.mining.positives",
    "pretrain": "psm.training.pretrain",
    "register_method": "psm.methods",
    "register_part": "psm.methods",
}

__all__ = [
    "ContrastiveLoss",
    "MemoryBank",
    "NegativeSampler",
    "NegativeSource",
    "NegativeWeighting",
    "Objective",
    "PositiveRule",
    "evaluate",
    "get_method",
    "inspect",
    "keep_probability",
    "list_methods",
    "load_encoder",
    "method_loss",
    "mine_negatives",
    "pretrain",
    "register_method",
    "register_part",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        import importlib

        value = getattr(importlib.import_module(_HOMES[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'psm' has no attribute {name!r}")
