"""Experiments about the settings of each method: the grid they are chosen by, published ones, and what they bring."""

from typing import Any

from psm.experiments.rows import TITLES, TRIAL_HOLDOUT, TRIAL_SEED, Configuration, Experiment, method_row
from psm.experiments.tuned import read_tuned, tuned_settings

# The grid of `settle`: learning rates for all, and settings that a method's authors or its code name.
SETTLE_LRS = (0.03, 0.06, 0.12)
SHARED_LR = 0.06  # of the preset overnight
_COOLER: dict[str, dict[str, Any]] = {"t = 0.2": {"loss.temperature": 0.2}}  # MoCo v2's, of methods with a softmax
_PREDICTOR: dict[str, dict[str, Any]] = {"predictor 10x": {"predictor.lr_factor": 10.0}}
SETTLE_METHODS: dict[str, dict[str, dict[str, Any]]] = {  # method -> words -> keys
    "simclr": _COOLER,
    "mocov2": _COOLER,
    "byol": {"momentum to 1": {"target.schedule": "cosine"}},
    "vicreg": {
        "wide linear heads": {"heads.hidden_dim": 2048, "heads.out_dim": 2048, "heads.norm_last": "none"},
    },
    "mochi": _COOLER | {"1/64 hardest": {"negatives.hard_share": 1 / 64}},
    "dcl": _COOLER | {"tau = 0.05": {"weighting.tau": 0.05}},
    "hcl": _COOLER | {"beta = 0.5": {"weighting.beta": 0.5}},
    "bcl": _COOLER | {"alpha = 0.7, beta = 1": {"weighting.alpha": 0.7, "weighting.beta": 1.0}},
    "nnclr": _COOLER | {"t = 0.1": {"loss.temperature": 0.1}},
    "snclr": _COOLER | _PREDICTOR,
    "psm": _COOLER | _PREDICTOR,
    "psmv2": _COOLER | {"beta = 0.5": {"weighting.beta": 0.5}},
}


# A variant is tried at the shared rate, PSM's predictor at all: the whole grid would take a tenth of what the study may
# cost.
ALL_LRS = {("psm", "predictor 10x")}


def _settle_rows() -> tuple[Configuration, ...]:
    """Each method at each learning rate, and with each of the settings above."""
    rows = []
    for method, variants in SETTLE_METHODS.items():
        for words, own in {"": {}, **variants}.items():
            series = f"{TITLES[method]}, {words}" if words else TITLES[method]
            for lr in SETTLE_LRS if not own or (method, words) in ALL_LRS else (SHARED_LR,):
                keys = {"method": method, "images.holdout": TRIAL_HOLDOUT, "optim.lr": lr, **own}
                shared = lr == SHARED_LR and not own
                title = f"{series}, lr {lr:g}"
                rows.append(Configuration(title, keys, value=lr, group=method, series=series, shared=shared))
    return tuple(rows)


# Where the code that a method's authors published differs from what all methods share here (docs/maths.md).
DEPARTURES: dict[str, dict[str, dict[str, Any]]] = {  # method -> words -> keys
    "simclr": {"crops from 0.08": {"views.preset": "simclr"}},
    "hcl": {"crops from 0.08": {"views.preset": "simclr"}},
    "mocov2": {"one direction": {"loss.symmetric": False}},
    "mochi": {"1/64 hardest": SETTLE_METHODS["mochi"]["1/64 hardest"]},
    "byol": {
        "sum of directions": {"loss.reduction": "sum"},
        "linear end of heads": {"heads.norm_last": "none"},
        **SETTLE_METHODS["byol"],
    },
    "vicreg": SETTLE_METHODS["vicreg"],
    "snclr": {"sum of directions": {"loss.reduction": "sum"}},
    "psm": {"crops from 0.08": {"views.preset": "simclr"}, "sum of directions": {"loss.reduction": "sum"}},
}


def _departure_rows() -> tuple[Configuration, ...]:
    """Each method as all are, and with each of its departures."""
    rows = []
    for method, changes in DEPARTURES.items():
        title, shared = TITLES[method], {"method": method, "images.holdout": TRIAL_HOLDOUT}
        rows.append(Configuration(title, shared))
        rows += [Configuration(f"{title}, {words}", {**shared, **keys}, title) for words, keys in changes.items()]
    return tuple(rows)


def _tuned_rows() -> tuple[Configuration, ...]:
    """Each method that `tuned.yaml` has settings for on CIFAR-10: as all are, and with these; and PSM at t = 0.2."""
    rows = []
    for method in read_tuned().get("cifar10", {}):
        title = TITLES[method]
        keys = {key.replace(".", "__"): value for key, value in tuned_settings(read_tuned(), "cifar10", method).items()}
        rows += [method_row(title, method), method_row(f"{title}, tuned", method, title, **keys)]
    # Not chosen for PSM, but what most of the others gain by: does it hold PSM back in a longer run?
    rows += [method_row("PSM", "psm"), method_row("PSM, t = 0.2", "psm", "PSM", loss__temperature=0.2)]
    return tuple(rows)


TUNING = (
    Experiment(
        "departures",
        "Where published code differs",
        "All methods share crops, directions, heads and momentum here. What does each bring as its authors' code has "
        "it?",
        "table",
        _departure_rows(),
        ("cifar10",),
        note="Each beside the same method with what all share (docs/maths.md). A sum of both directions is twice the "
        "loss, and so twice the rate. Scored on a tenth of each class of the training images, which is not trained on, "
        "with a seed that no other experiment reports.",
        in_all=False,
        seeds=(TRIAL_SEED,),
    ),
    Experiment(
        "settle",
        "Which settings each method gets",
        "A common grid of learning rates, and for each method the few settings that its authors or its code name: "
        "which are best on held-out training images?",
        "grid",
        _settle_rows(),
        ("cifar10",),
        axis="learning rate",
        note="Scored on a tenth of each class of the training images, which is not trained on, with a seed that no "
        "other experiment reports. Of each method settle.yaml, which preset=tuned takes by tuned=FILE, has the best by "
        "the linear score, and the shared settings where they are within one standard error of it.",
        in_all=False,
        seeds=(TRIAL_SEED,),
    ),
    Experiment(
        "tuned",
        "What settings of its own bring each method",
        "The methods that the grid gives settings of their own: how much are they ahead of themselves with what all "
        "share?",
        "table",
        _tuned_rows(),
        ("cifar10",),
        note="The settings are those of psm/experiments/tuned.yaml, chosen on held-out training images with a seed "
        "that is not reported here. Methods that are not here keep the shared settings under preset=tuned, and so does "
        "PSM: its row at t = 0.2, which the grid did not choose, is a check.",
        in_all=False,
    ),
)
