"""Experiments beside the paper's: each ingredient alone, the successor, and how sharply negatives are mined."""

from dataclasses import replace
from typing import Any

from psm.experiments.rows import (
    EQUAL_SUM,
    TRIAL_HOLDOUT,
    TRIAL_SEED,
    Configuration,
    Experiment,
    method_row,
    psm_row,
    successor_row,
)

# One change to PSM each, by key.
INGREDIENTS: dict[str, dict[str, Any]] = {
    "no predictor": {"predictor__enabled": False},
    "predictor, 10x rate": {"predictor__lr_factor": 10.0},
    "weak target": {"target__views": "weak"},
    "momentum to 1": {"target__schedule": "cosine"},
    "hard negatives": {"weighting__name": "hard"},
    "mixed rows": {"positives__mix": True},
    "agreed rows": {"positives__agree": True, **EQUAL_SUM},
    "most similar quarter": {"positives__share": 0.25, **EQUAL_SUM},
    "mined by the mean view": {"bank__keys": "mean"},
    "t = 0.1 in eq. 5": {"positives__temperature": 0.1},
    "start at 25 %": {"positives__start": 0.25},
    "no rows (control)": {"positives__k": 0, "monitor__purity": False, **EQUAL_SUM},
    "decoupled": {"objective__name": "decoupled"},
    "redundancy": {"loss__redundancy_weight": 5.0},
}


# Combinations that were tried for a successor. Rows of PSM, whatever PSM v2 is made of.
_PARTS: dict[str, dict[str, Any]] = {
    "no predictor": {"predictor__enabled": False},
    "weak target": {"target__views": "weak"},
    "hard negatives": {"weighting__name": "hard"},
    "mixed rows": {"positives__mix": True},
}
_ALL_PARTS: dict[str, Any] = {key: value for part in _PARTS.values() for key, value in part.items()}
_ONE_NETWORK: dict[str, Any] = {"target__enabled": False, "target__views": "same"}
_NO_ROWS: dict[str, Any] = {"positives__k": 0, "positives__mix": False, "monitor__purity": False, **EQUAL_SUM}
# The purest rows: mined by the mean of the views, the most similar quarter, when half of the steps are done.
_SURE_ROWS: dict[str, Any] = {
    "bank__keys": "mean",
    "positives__share": 0.25,
    "positives__temperature": 0.1,
    "positives__start": 0.5,
    "positives__mix": False,
    **EQUAL_SUM,
}
# As ReSSL and SCE have it: the key and, by a sharp softmax, the rows like its weak view, against the whole bank.
_SOFT_TARGETS: dict[str, Any] = {
    "positives__k": 20,
    "positives__temperature": 0.05,
    "positives__mix": False,
    "negatives__source": "bank",
    "weighting__name": "sum",
    "sampler__name": "none",
    "loss__hard_weight": 0.0,
    "loss__temperature": 0.2,
}
_FOUR_VIEWS: dict[str, Any] = {"views__count": 4, "batch_size": 32}  # as many views a step, half as many images
COMBINATIONS: dict[str, dict[str, Any]] = {
    "all four": {},
    "target on the same views": {"target__views": "same"},
    "rows not mixed": {"positives__mix": False},
    "negatives summed": {"weighting__name": "sum"},
    "no rows (control)": _NO_ROWS,
    "one network": _ONE_NETWORK,
    "one network, no rows (control)": _ONE_NETWORK | _NO_ROWS,
    "t = 0.2": {"loss__temperature": 0.2},
    "all negatives": {"sampler__name": "none"},
    "momentum 0.95": {"target__momentum": 0.95},
    "agreed rows": {"positives__agree": True},
    "t = 0.1 in eq. 5": {"positives__temperature": 0.1},
    "k = 1": {"positives__k": 1},
    "redundancy": {"loss__redundancy_weight": 5.0},
    "decoupled": {"objective__name": "decoupled"},
    "4 views, half the batch": _FOUR_VIEWS,
    "4 views, half the batch, lr 0.12": _FOUR_VIEWS | {"optim__lr": 0.12},
    "4 views, half the batch, one network": _FOUR_VIEWS | _ONE_NETWORK,
    "4 views, half the batch, one network, L_soft at a third": {
        **(_FOUR_VIEWS | _ONE_NETWORK | EQUAL_SUM),
        "loss__soft_weight": 0.33,
    },
    "4 views, half the batch, one network, sure rows": _FOUR_VIEWS | _ONE_NETWORK | _SURE_ROWS,
    "4 views, half the batch, one network, no rows (control)": _FOUR_VIEWS | _ONE_NETWORK | _NO_ROWS,
    "soft targets over the bank": _SOFT_TARGETS,
    "soft targets over the bank, t = 0.1": _SOFT_TARGETS | {"loss__temperature": 0.1},
    "lr 0.03": {"optim__lr": 0.03},
    "lr 0.12": {"optim__lr": 0.12},
}


# Negatives that are mined more sharply: of more rows, by more weight, or by PNSM with a steeper fall-off.
SHARPER: dict[str, tuple[str, str, dict[str, Any]]] = {  # title -> reference, method, keys
    "HCL, beta = 2": ("HCL", "hcl", {"weighting__beta": 2.0}),
    "HCL, bank": ("HCL", "hcl", {"negatives__source": "bank"}),
    "HCL, bank, beta = 2": ("HCL", "hcl", {"negatives__source": "bank", "weighting__beta": 2.0}),
    "HCL, PNSM a = 5": ("HCL", "hcl", {"sampler__name": "pnsm", "sampler__a": 5.0}),
    "SimCLR, PNSM a = 5": ("SimCLR", "simclr", {"sampler__name": "pnsm", "sampler__a": 5.0}),
    "SimCLR, PNSM a = 20": ("SimCLR", "simclr", {"sampler__name": "pnsm", "sampler__a": 20.0}),
    "SimCLR, PNSM a = 50": ("SimCLR", "simclr", {"sampler__name": "pnsm", "sampler__a": 50.0}),
    "HCL, PNSM a = 20": ("HCL", "hcl", {"sampler__name": "pnsm", "sampler__a": 20.0}),
    "SimCLR, t = 0.2": ("SimCLR", "simclr", {"loss__temperature": 0.2}),
    "SimCLR, t = 0.1": ("SimCLR", "simclr", {"loss__temperature": 0.1}),
    **{
        f"SimCLR, t = 0.2, PNSM a = {a}": (
            "SimCLR, t = 0.2",
            "simclr",
            {"loss__temperature": 0.2, "sampler__name": "pnsm", "sampler__a": float(a)},
        )
        for a in (5, 20)
    },
    "HCL, t = 0.2": ("HCL", "hcl", {"loss__temperature": 0.2}),
    "PSM v2, summed, t = 0.2": ("HCL", "psmv2", {"loss__temperature": 0.2, "weighting__name": "sum"}),
    "PSM, t = 0.2": ("PSM", "psm", {"loss__temperature": 0.2}),
    "MoCo v2, hard": ("MoCo v2", "mocov2", {"weighting__name": "hard"}),
    "MoCo v2, PNSM a = 20": ("MoCo v2", "mocov2", {"sampler__name": "pnsm", "sampler__a": 20.0}),
    "MoCo v2, hard, weak target": ("MoCo v2", "mocov2", {"weighting__name": "hard", "target__views": "weak"}),
    "PSM, a = 5": ("PSM", "psm", {"sampler__a": 5.0}),
    "PSM, a = 20": ("PSM", "psm", {"sampler__a": 20.0}),
    "HCL, 4 views": ("HCL", "hcl", _FOUR_VIEWS),
    "SimCLR, 4 views, t = 0.2": ("HCL, 4 views", "simclr", _FOUR_VIEWS | {"loss__temperature": 0.2}),
    "HCL, 4 views, PNSM a = 5": ("HCL, 4 views", "hcl", _FOUR_VIEWS | {"sampler__name": "pnsm", "sampler__a": 5.0}),
    "HCL, 4 views, PNSM a = 20": ("HCL, 4 views", "hcl", _FOUR_VIEWS | {"sampler__name": "pnsm", "sampler__a": 20.0}),
}


# PSM v2 with one of its parts taken away.
SUCCESSOR_WITHOUT: dict[str, dict[str, Any]] = {
    "no mined rows": {"positives__k": 0, "monitor__purity": False},
    "rows from the start": {"positives__start": 0.0},
    "all rows": {"positives__share": 1.0},
    "rows of single views": {"bank__keys": "view"},
    "negatives summed": {"weighting__name": "sum"},
    "all negatives": {"sampler__name": "none"},
    "with a target": {"target__enabled": True},
}


# Whether a method overtakes with steps: a schedule of its own each, not a point of one run.
SCHEDULES = {"a quarter": 0.25, "all": 1.0}  # of the preset's epochs


def _schedule_rows() -> tuple[Configuration, ...]:
    """The methods whose order may depend on the number of steps, each with each schedule."""
    methods = (
        method_row("SimCLR", "simclr"),
        method_row("HCL", "hcl"),
        method_row("BYOL", "byol"),
        method_row("SNCLR", "snclr"),
        psm_row("PSM"),
        successor_row("PSM v2"),
    )
    return tuple(
        replace(row, title=f"{row.title}, {words} of the epochs", series=row.title, value=share, epochs_share=share)
        for words, share in SCHEDULES.items()
        for row in methods
    )


def _held_out(row: Configuration) -> Configuration:
    """The row scored on held-out training images, without what a figure measures on its run."""
    return replace(row, settings={**row.settings, "images.holdout": TRIAL_HOLDOUT}, gradients=False)


SUCCESSOR = (
    Experiment(
        "combinations",
        "Which parts a successor of PSM is made of",
        "PSM with four parts changed together, and that with one thing more or less: which combination is best on "
        "held-out training images?",
        "table",
        tuple(
            _held_out(row)
            for row in (
                psm_row("PSM"),
                method_row("SimCLR", "simclr", "PSM"),
                method_row("HCL", "hcl", "PSM"),
                *(
                    replace(method_row(f"HCL, 4 views, half the batch{words}", "hcl", "HCL", **keys), highlight=False)
                    for words, keys in {"": _FOUR_VIEWS, ", lr 0.12": _FOUR_VIEWS | {"optim__lr": 0.12}}.items()
                ),
                *(
                    psm_row(title, "PSM" if title == "all four" else "all four", **(_ALL_PARTS | changes))
                    for title, changes in COMBINATIONS.items()
                ),
            )
        ),
        ("cifar10",),
        note="All four: no predictor, weak target views, hard negatives, mixed rows. Sure rows: not mixed, mined by "
        "the mean of the views, the most similar quarter, t = 0.1 in eq. 5, from half of the steps on. Scored on a "
        "tenth of each class of the training images, which is not trained on, with a seed that no other experiment "
        "reports.",
        in_all=False,
        seeds=(TRIAL_SEED,),
    ),
    Experiment(
        "negatives",
        "How sharply negatives are mined",
        "Hard negatives help most: do more of them, more weight on them, or a steeper PNSM help further, and is a "
        "lower temperature enough?",
        "table",
        tuple(
            _held_out(row)
            for row in (
                method_row("SimCLR", "simclr"),
                method_row("HCL", "hcl", "SimCLR"),
                method_row("PSM", "psm", "SimCLR"),
                method_row("MoCo v2", "mocov2", "SimCLR"),
                *(
                    replace(method_row(title, method, reference, **keys), highlight=False)
                    for title, (reference, method, keys) in SHARPER.items()
                ),
            )
        ),
        ("cifar10",),
        note="Bank: the rows of the memory bank instead of the other images of the batch. Scored on a tenth of each "
        "class of the training images, which is not trained on, with a seed that no other experiment reports.",
        in_all=False,
        seeds=(TRIAL_SEED,),
    ),
    Experiment(
        "pnsm",
        "PNSM mined sharply",
        "With the paper's a = 0.5 PNSM keeps most negatives. Does it help SimCLR, HCL and PSM with the a that held-out "
        "images choose?",
        "table",
        (
            method_row("SimCLR", "simclr"),
            method_row("SimCLR, PNSM a = 0.5", "simclr", "SimCLR", sampler__name="pnsm"),
            method_row("SimCLR, PNSM a = 20", "simclr", "SimCLR", sampler__name="pnsm", sampler__a=20.0),
            method_row("HCL", "hcl"),
            method_row("HCL, PNSM a = 0.5", "hcl", "HCL", sampler__name="pnsm"),
            method_row("HCL, PNSM a = 5", "hcl", "HCL", sampler__name="pnsm", sampler__a=5.0),
            method_row("PSM", "psm"),
            method_row("PSM, a = 20", "psm", "PSM", sampler__a=20.0),
        ),
        ("cifar10",),
        note="The values of a are the best of the experiment negatives, by held-out training images and a seed that is "
        "not reported here. The rows with a = 0.5 are those of table 3.",
        in_all=False,
    ),
    Experiment(
        "ingredients",
        "What each ingredient of a better PSM brings alone",
        "PSM with one thing changed: which published ideas help it on held-out training images?",
        "table",
        tuple(
            _held_out(row)
            for row in (psm_row("PSM"), *(psm_row(title, "PSM", **changes) for title, changes in INGREDIENTS.items()))
        ),
        ("cifar10",),
        note="One key each (docs/maths.md). The control has the key alone, at the weight of key and mined rows "
        "together. Scored on a tenth of each class of the training images, which is not trained on, with a seed that "
        "no other experiment reports.",
        in_all=False,
        seeds=(TRIAL_SEED,),
    ),
    Experiment(
        "successor",
        "PSM v2 beside the methods it has to beat",
        "Is PSM v2 ahead of PSM and of the best of the eleven, and which of its parts earn their place?",
        "table",
        (
            psm_row("PSM"),
            method_row("SimCLR", "simclr", "PSM"),
            method_row("HCL", "hcl", "PSM"),
            method_row("SNCLR", "snclr", "PSM"),
            method_row("BYOL", "byol", "PSM"),
            successor_row("PSM v2", "PSM"),
            successor_row("PSM v2, 4 views", "HCL, 4 views", **_FOUR_VIEWS),
            replace(method_row("HCL, 4 views", "hcl", "HCL", **_FOUR_VIEWS), highlight=False),
            *(
                replace(row, title=f"{row.title}, half the epochs", reference="HCL", highlight=False, epochs_share=0.5)
                for row in (
                    successor_row("PSM v2, 4 views", **_FOUR_VIEWS),
                    method_row("HCL, 4 views", "hcl", **_FOUR_VIEWS),
                )
            ),
            *(
                successor_row(f"PSM v2, 4 views, {words}", "PSM v2, 4 views", **_FOUR_VIEWS, **change)
                for words, change in SUCCESSOR_WITHOUT.items()
            ),
        ),
        ("cifar10",),
        note="4 views: of half as many images a step, so that a step has as many views; an epoch sees the same images "
        "in twice the computation, half the epochs as many views in the same. In the last rows one part of PSM v2 is "
        "taken away, the others left, at an equal sum of weights.",
        in_all=False,
    ),
    Experiment(
        "schedules",
        "What more steps bring",
        "Two schedule lengths, each with a warm-up and a decay of its own: which method gains most from more steps, "
        "and who overtakes whom?",
        "schedules",
        _schedule_rows(),
        ("cifar10",),
        axis="steps",
        in_all=False,
    ),
)
