"""psm: learn image encoders from unlabeled images by contrastive learning with mined samples."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from psm.data import load_dataset
    from psm.embedding.embed import embed
    from psm.embedding.embedder import Embedder
    from psm.embedding.index import ImageIndex
    from psm.embedding.search import search
    from psm.evaluation.evaluate import evaluate
    from psm.exporting.export import export
    from psm.finetuning.finetune import finetune
    from psm.finetuning.predict import predict
    from psm.finetuning.worth.run import worth
    from psm.losses.contrastive import ContrastiveLoss
    from psm.losses.method_loss import method_loss
    from psm.losses.negative_weighting import NegativeWeighting
    from psm.losses.objectives import Objective
    from psm.methods import get_method, list_methods, register_method, register_part
    from psm.mining.memory_bank import MemoryBank
    from psm.mining.negatives import NegativeSource
    from psm.mining.pnsm import NegativeSampler, keep_probability, mine_negatives
    from psm.mining.positives import PositiveRule
    from psm.models.classifier import load_classifier
    from psm.models.factory import create_encoder, list_encoders
    from psm.models.outputs import mean_keys
    from psm.models.pretrained import load_encoder
    from psm.models.published import list_pretrained
    from psm.models.siamese import SiameseNetworks
    from psm.reporting.explorer import explore
    from psm.reporting.inspector import inspect
    from psm.training.pretrain import pretrain
    from psm.views.transform import Views

    __version__: str

# Public name -> module that defines it. Imported on first use: `import psm` and `psm --help` do not import torch.
_MODULES = {
    "ContrastiveLoss": "psm.losses.contrastive",
    "Embedder": "psm.embedding.embedder",
    "ImageIndex": "psm.embedding.index",
    "MemoryBank": "psm.mining.memory_bank",
    "NegativeSampler": "psm.mining.pnsm",
    "NegativeSource": "psm.mining.negatives",
    "NegativeWeighting": "psm.losses.negative_weighting",
    "Objective": "psm.losses.objectives",
    "PositiveRule": "psm.mining.positives",
    "SiameseNetworks": "psm.models.siamese",
    "Views": "psm.views.transform",
    "create_encoder": "psm.models.factory",
    "embed": "psm.embedding.embed",
    "evaluate": "psm.evaluation.evaluate",
    "export": "psm.exporting.export",
    "explore": "psm.reporting.explorer",
    "finetune": "psm.finetuning.finetune",
    "get_method": "psm.methods",
    "inspect": "psm.reporting.inspector",
    "keep_probability": "psm.mining.pnsm",
    "list_encoders": "psm.models.factory",
    "list_methods": "psm.methods",
    "list_pretrained": "psm.models.published",
    "load_classifier": "psm.models.classifier",
    "load_dataset": "psm.data",
    "load_encoder": "psm.models.pretrained",
    "mean_keys": "psm.models.outputs",
    "method_loss": "psm.losses.method_loss",
    "mine_negatives": "psm.mining.pnsm",
    "predict": "psm.finetuning.predict",
    "pretrain": "psm.training.pretrain",
    "register_method": "psm.methods",
    "register_part": "psm.methods",
    "search": "psm.embedding.search",
    "worth": "psm.finetuning.worth.run",
}

__all__ = [
    "ContrastiveLoss",
    "Embedder",
    "ImageIndex",
    "MemoryBank",
    "NegativeSampler",
    "NegativeSource",
    "NegativeWeighting",
    "Objective",
    "PositiveRule",
    "SiameseNetworks",
    "Views",
    "__version__",
    "create_encoder",
    "embed",
    "evaluate",
    "explore",
    "export",
    "finetune",
    "get_method",
    "inspect",
    "keep_probability",
    "list_encoders",
    "list_methods",
    "list_pretrained",
    "load_classifier",
    "load_dataset",
    "load_encoder",
    "mean_keys",
    "method_loss",
    "mine_negatives",
    "predict",
    "pretrain",
    "register_method",
    "register_part",
    "search",
    "worth",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        value: Any = version("psm")
    elif name in _MODULES:
        value = getattr(importlib.import_module(_MODULES[name]), name)
    else:
        raise AttributeError(f"module 'psm' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
