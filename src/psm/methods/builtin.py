"""The eleven methods of the paper's comparison, a row each, and the successor that this project makes of PSM."""

from dataclasses import replace
from typing import Any

from psm.methods.registry import METHODS, register_method

NO_NEGATIVES = {"negatives": "none", "sampler": "none"}


def _add(name: str, title: str, reference: str, base: str | None = None, **parts: Any) -> None:
    METHODS[name] = replace(register_method(name, title, reference, base, **parts), builtin=True)


_add(
    "psm",
    "PSM: the key and mined positives, mined negatives",
    "Dong, Long, Li: Rethinking Samples Selection for Contrastive Learning: Mining of Potential Samples",
)
_add(
    "snclr",
    "SNCLR: soft neighbors as positives",
    "Ge et al.: Soft Neighbors are Positive Supporters in Contrastive Visual Representation Learning (2023)",
    sampler="none",
    loss={"hard_weight": 0.0},
)
_add(
    "simclr",
    "SimCLR: the other view against both views of the other images",
    "Chen et al.: A Simple Framework for Contrastive Learning of Visual Representations (2020)",
    target={"enabled": False},
    predictor={"enabled": False},
    positives="view",
    negatives="views",
    sampler="none",
    loss={"hard_weight": 0.0},
)
_add(
    "dcl",
    "DCL (debiased): SimCLR with false negatives subtracted from the sum",
    "Chuang et al.: Debiased Contrastive Learning (2020)",
    base="simclr",
    weighting="debiased",
)
_add(
    "hcl",
    "HCL: DCL with hard negatives weighing more",
    "Robinson et al.: Contrastive Learning with Hard Negative Samples (2021)",
    base="simclr",
    weighting="hard",
)
_add(
    "bcl",
    "BCL: SimCLR with negatives weighed by the probability that they are true and hard",
    "Liu, Wang: Bayesian Self-Supervised Contrastive Learning (2023)",
    base="simclr",
    weighting="bayesian",
)
_add(
    "mocov2",
    "MoCo v2: the key against a bank of earlier keys",
    "Chen et al.: Improved Baselines with Momentum Contrastive Learning (2020)",
    predictor={"enabled": False},
    positives="view",
    negatives="bank",
    sampler="none",
    bank={"allow_self": True},
    loss={"hard_weight": 0.0},
)
_add(
    "mochi",
    "MoCHi: MoCo v2 with synthetic hard negatives",
    "Kalantidis et al.: Hard Negative Mixing for Contrastive Learning (2020)",
    base="mocov2",
    negatives="mochi",
)
_add(
    "nnclr",
    "NNCLR: the key's nearest bank row instead of the key",
    "Dwibedi et al.: With a Little Help from My Friends (2021)",
    target={"enabled": False},
    positives="nn",
    negatives="queries",
    sampler="none",
    loss={"hard_weight": 0.0},
)
_add(
    "byol",
    "BYOL: predict the key, no negatives",
    "Grill et al.: Bootstrap Your Own Latent (2020)",
    positives="view",
    objective="byol",
    loss={"hard_weight": 0.0},
    **NO_NEGATIVES,
)
_add(
    "vicreg",
    "VICReg: close views, spread and decorrelated dimensions",
    "Bardes, Ponce, LeCun: VICReg (2022)",
    target={"enabled": False},
    predictor={"enabled": False},
    positives="view",
    objective="vicreg",
    loss={"hard_weight": 0.0},
    **NO_NEGATIVES,
)

# Beside the paper's comparison. Parts alone and together: `psm experiment run ingredients combinations successor`.
_add(
    "psmv2",
    "PSM v2: one network, hard and mined negatives, and from half of the steps on the purest mined rows",
    "this project (docs/methods.md), with the hard negatives of Robinson et al.: HCL (2021)",
    base="psm",
    positives={"share": 0.25, "temperature": 0.1, "start": 0.5},
    bank={"keys": "mean"},
    weighting="hard",
    target={"enabled": False},
    predictor={"enabled": False},
    loss={"weight_sum": 3.0},
)
