"""psm: learn image encoders from unlabelled pictures by contrastive learning with mined samples."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from psm.export import load_encoder
    from psm.inspector import inspect
    from psm.pretraining import pretrain
    from psm.scoring import evaluate

__all__ = ["evaluate", "inspect", "load_encoder", "pretrain"]

# Imported when first used: `psm --help` answers without torch.
_HOMES = {
    "pretrain": "psm.pretraining",
    "evaluate": "psm.scoring",
    "inspect": "psm.inspector",
    "load_encoder": "psm.export",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        import importlib

        value = getattr(importlib.import_module(_HOMES[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'psm' has no attribute {name!r}")
