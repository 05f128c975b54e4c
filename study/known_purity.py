"""What mining without mistakes would bring: positives and negatives that are mined with the labels.

    psm experiment run known-purity preset=overnight epochs=4 out=study plugins=study/known_purity.py

A plugin, so that no part of the package sees labels. The labels are those of CIFAR-10 below data/; where it is
elsewhere, name that folder twice: images.root=FOLDER for the images, PSM_STUDY_DATA=FOLDER before the command.
"""

import os
from dataclasses import dataclass, fields
from functools import cache

import torch
from torch import Tensor

import psm
from psm.config.parts import setting
from psm.config.schema import ImagesConfig
from psm.data import load_dataset
from psm.experiments import EXPERIMENTS, Configuration, Experiment
from psm.mining.batch import MiningBatch
from psm.mining.draws import Draws, as_draws
from psm.mining.negatives import Anchors, BatchCandidates, Candidates, Negatives, ViewNegatives
from psm.mining.positives import PositiveRule, Positives, single

HOLDOUT = 0.1
TRUE = {"negatives__source": "true_views"}
NEAREST = {"positives__k": 1, "positives__share": 1.0, "positives__start": 0.0}


@cache
def labels() -> torch.Tensor:
    """Labels of the images that the runs train on, by id."""
    config = ImagesConfig(root=os.environ.get("PSM_STUDY_DATA", "data"), holdout=HOLDOUT, size=32)
    found = load_dataset("cifar10", config, progress=False).train.labels
    assert found is not None
    return found


@psm.register_part("positives", "known_purity")
@dataclass(frozen=True)
class KnownPurity(PositiveRule):
    """The key, and the nearest bank row of those that have the query's label, with probability p, or of the others."""

    p: float = setting(1.0, "probability that the row has the query's label", at_least=0, at_most=1)

    metric_names = ("row_purity", "row_similarity")

    @property
    def num_mined(self) -> int:
        return 1

    def candidates(self, batch: MiningBatch) -> int:
        """Among how many of the nearest rows one of either kind is sought."""
        return 64

    def choose(self, suits: Tensor, draws: Draws) -> Tensor:
        """Column (N,) of the row, from a mask (N, M) of those that suit, the nearest first; without any the nearest."""
        return suits.float().argmax(1)

    def __call__(self, batch: MiningBatch) -> Positives:
        mined = batch.search("positives.rule=known_purity", self.candidates(batch))
        of = labels().to(batch.key.device)
        same = of[mined.ids.clamp(min=0)] == of[batch.ids][:, None]
        draws, count = as_draws(batch.positive_generator or batch.draws or batch.generator), len(same)
        draws.start(count, count, 1, 1)
        draws.seek(slice(0, count))
        wanted = draws.uniform(1, same.device) < self.p
        pick = torch.arange(count, device=same.device), self.choose(same == wanted, draws)
        usable = mined.found
        key = single(batch.key, batch.ids, mined=False)
        row = mined.vectors[pick].to(batch.key.dtype)[:, None]
        metrics = {
            "row_purity": (same[pick] & usable).sum() / usable.sum().clamp(min=1),
            "row_similarity": (mined.similarity[pick] * usable).sum() / usable.sum().clamp(min=1),
        }
        return Positives(
            torch.cat([key.vectors, row], 1),
            torch.cat([key.weights, usable.to(key.weights.dtype)[:, None]], 1),
            torch.cat([key.mask, usable[:, None]], 1),
            torch.cat([key.ids, mined.ids[pick][:, None]], 1),
            first_mined=1,
            metrics=metrics,
        )

    def describe(self) -> str:
        return f"key + the nearest bank row that has the label in {self.p:.0%} of cases"


@psm.register_part("positives", "any_known")
@dataclass(frozen=True)
class AnyKnown(KnownPurity):
    """The same with any row of the bank, not the nearest.

    All rows are searched for, so a query has one once the bank is full and while its own image is not in it.
    """

    def candidates(self, batch: MiningBatch) -> int:
        return len(batch.require_bank("positives.rule=any_known").rows)

    def choose(self, suits: Tensor, draws: Draws) -> Tensor:
        count, columns = suits.shape
        draws.start(count, count, columns, 1)
        draws.seek(slice(0, count))
        return (suits * draws.uniform(columns, suits.device)).argmax(1)

    def describe(self) -> str:
        return f"key + a bank row that has the label in {self.p:.0%} of cases"


@dataclass(frozen=True)
class TrueCandidates(BatchCandidates):
    """Candidates of the batch; those of images with the anchor's label are no negatives of it."""

    def logits(self, anchors: Anchors, *tensors: Tensor) -> Negatives:
        assert self.ids is not None
        assert self.owners is not None
        found = super().logits(anchors, *tensors)
        of = labels().to(found.similarity.device)
        other = of[self.owners[anchors.rows]][:, None] != of[self.ids.flatten()]
        return found._replace(allowed=found.mask & other)


@psm.register_part("negatives", "true_views")
@dataclass(frozen=True)
class TrueNegatives(ViewNegatives):
    """Both views of the other images, without those of images with the query's label."""

    def __call__(self, batch: MiningBatch, positives: Positives) -> Candidates:
        found = super().__call__(batch, positives)
        assert isinstance(found, BatchCandidates)
        given = {field.name: getattr(found, field.name) for field in fields(found)}
        return TrueCandidates(**given | {"targets": 0})  # with targets the loss would pass over ``logits`` on a GPU

    def describe(self) -> str:
        return "other images with another label, both views"


def _row(title: str, reference: str | None = None, **changes: object) -> Configuration:
    """PSM v2 with two views and with other mined rows, or another method."""
    keys = {name.replace("__", "."): value for name, value in changes.items()}
    return Configuration(
        title, {"method": "psmv2", "images.holdout": HOLDOUT, "monitor.purity": True, **keys}, reference
    )


EXPERIMENTS["known-purity"] = Experiment(
    "known-purity",
    "What mining without mistakes would bring",
    "If mined positives had the query's label in a known share of cases, or no negative had it: what would that bring?",
    "table",
    (
        _row("no rows", positives__k=0, monitor__purity=False),
        _row("nearest row", "no rows", **NEAREST),
        _row("nearest of 32,768 rows", "no rows", bank__size=32_768, **NEAREST),
        _row("nearest, 75% right", "no rows", positives__rule="known_purity", positives__p=0.75),
        _row("nearest, 100% right", "no rows", positives__rule="known_purity", positives__p=1.0),
        _row("any row, 100% right", "no rows", positives__rule="any_known"),
        _row("SimCLR", method="simclr", monitor__purity=False),
        _row("SimCLR, no false negatives", "SimCLR", method="simclr", monitor__purity=False, **TRUE),
        _row("HCL", method="hcl", monitor__purity=False),
        _row("HCL, no false negatives", "HCL", method="hcl", monitor__purity=False, **TRUE),
    ),
    ("cifar10",),
    note="PSM v2 with two views and one mined row from the first step on, at an equal sum of weights. In the last rows "
    "the labels choose which row it is, or leave out negatives of the query's own label: no method, but what the best "
    "of mining could bring.",
    in_all=False,
    seeds=(100,),
)
