"""Few labels: 1 %, 10 % or n a class of the training images, drawn several times; scores as a mean over draws."""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from psm.evaluation.accuracy import Accuracy
from psm.evaluation.intervals import Interval, t_interval
from psm.utils.errors import UserError
from psm.utils.seeding import generator

_FORMAT = re.compile(r"(\d+(?:\.\d+)?)\s*(%?)")


@dataclass(frozen=True)
class LabelAmount:
    """How many training images have a label: a percentage of each class, or a number a class."""

    number: float
    percent: bool

    @classmethod
    def parse(cls, text: str | float, key: str = "few_labels.amounts") -> "LabelAmount":
        """From `1%`, `10%` or `5` (a class); refused, under the name of the key, if it is neither."""
        match = _FORMAT.fullmatch(str(text).strip())
        number, percent = (float(match[1]), bool(match[2])) if match else (0.0, False)
        whole = percent or number == int(number)
        if number <= 0 or (percent and number > 100) or not whole:
            raise UserError(
                f"{key}={text} is no amount of labels: give a percentage up to 100 %, for example 1%, or a whole "
                "number of images a class, for example 5."
            )
        return cls(number, percent)

    def __str__(self) -> str:
        return f"{self.number:g} %" if self.percent else f"{self.number:g} a class"

    def of_class(self, size: int) -> int:
        """How many images of a class of this size are labeled: at least one, at most all."""
        wanted = round(size * self.number / 100) if self.percent else int(self.number)
        return min(size, max(1, wanted))

    def takes_all(self, labels: Tensor) -> bool:
        """True if every image is labeled, so that all draws are the same."""
        sizes = [size for size in labels.bincount().tolist() if size]
        return all(self.of_class(size) == size for size in sizes)


def draw_labeled(labels: Tensor, amount: LabelAmount, seed: int, draw: int = 0) -> Tensor:
    """Ascending indices of the labeled images: a random part of each class, another one with each seed and draw.

    With the same seed and draw a smaller amount is a subset of a larger one.

    Args:
        labels: classes of all training images, (N,).
        amount: how many of each class.
        seed: decides all draws.
        draw: number of the draw, from 0.
    """
    order = torch.randperm(len(labels), generator=generator(seed, "few labels", draw))
    chosen = []
    for label in labels.unique().tolist():
        members = order[labels[order] == label]
        chosen.append(members[: amount.of_class(len(members))])
    return torch.cat(chosen).sort().values


@dataclass(frozen=True)
class DrawStats:
    """Accuracies over several draws of labels."""

    draws: Sequence[Accuracy]

    @property
    def top1(self) -> float:
        """Mean top-1 over the draws, in percent."""
        return sum(draw.top1 for draw in self.draws) / len(self.draws)

    @property
    def top5(self) -> float:
        """Mean top-5 over the draws, in percent."""
        return sum(draw.top5 for draw in self.draws) / len(self.draws)

    @property
    def top1_interval(self) -> Interval:
        """95 % interval of top-1: over the draws (t), or of the test images (Wilson) where there is one draw."""
        return t_interval(draw.top1 for draw in self.draws) or self.draws[0].top1_interval

    @property
    def top5_interval(self) -> Interval:
        """As of top-1."""
        return t_interval(draw.top5 for draw in self.draws) or self.draws[0].top5_interval


def score_draws(
    labels: Tensor,
    amount: LabelAmount,
    draws: int,
    seed: int,
    score: Callable[[Tensor], Accuracy],
    advance: Callable[[int], None] = lambda count: None,
) -> DrawStats:
    """Score a classifier on each of several draws; once where the amount takes all labels.

    Args:
        labels: classes of all training images, (N,).
        amount: how many labels.
        draws: number of draws.
        seed: decides all draws.
        score: the test accuracy of a classifier trained on the images at these indices.
        advance: called with 1 after each draw.
    """
    found = []
    for draw in range(1 if amount.takes_all(labels) else draws):
        found.append(score(draw_labeled(labels, amount, seed, draw)))
        advance(1)
    return DrawStats(found)


def parse_amounts(texts: Iterable[str | float], key: str = "few_labels.amounts") -> list[LabelAmount]:
    """Amounts from a list such as ``["1%", "10%", "5"]``, each once."""
    return list(dict.fromkeys(LabelAmount.parse(text, key) for text in texts))
