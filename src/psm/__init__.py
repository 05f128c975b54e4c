"""psm: learn image encoders from unlabeled images by contrastive learning with mined samples."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from psm.evaluation.evaluate import evaluate
    from psm.models.pretrained import load_encoder
    from psm.reporting.inspector import inspect
    from psm.training.pretrain import pretrain

__all__ = ["evaluate", "inspect", "load_encoder", "pretrain"]

# Imported when first used: `psm --help` answers without torch.
_HOMES = {
    "pretrain": "psm.training.pretrain",
    "evaluate": "psm.evaluation.evaluate",
    "inspect": "psm.reporting.inspector",
    "load_encoder": "psm.models.pretrained",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        import importlib

        value = getattr(importlib.import_module(_HOMES[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'psm' has no attribute {name!r}")
