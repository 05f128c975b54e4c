"""From the cells to the answer: accuracy by the number of labels, the gain over scratch, and the labels saved."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from psm.finetuning.worth.cells import TITLES, CellResult
from psm.utils.seeding import generator
from psm.utils.statistics import Interval, t_quantile

SCRATCH = "scratch"
BOOTSTRAPS = 1000
_CHUNK = 100  # bootstraps at a time, which bounds memory


@dataclass(frozen=True)
class Point:
    """One arm at one number of labels: mean over draws in percent, and its 95 % interval."""

    arm: str
    amount: str
    labels: int
    draws: int
    top1: float
    interval: Interval
    each: list[float]  # top-1 of each draw


@dataclass(frozen=True)
class LabelsNeeded:
    """How many labels training from scratch needs for an accuracy, by interpolation on a logarithmic scale."""

    labels: float  # the nearest end of what was measured where it is out of range
    above: bool = False  # more than all labels that there are
    below: bool = False  # no more than the fewest that were tried


@dataclass(frozen=True)
class Gain:
    """The best use of the pretrained encoder against training from scratch, at one number of labels."""

    amount: str
    labels: int
    arm: str
    top1: float
    scratch: float
    gain: float  # in points
    interval: Interval  # 95 %, of the gain, draws and test images paired
    needed: LabelsNeeded
    needed_interval: tuple[LabelsNeeded, LabelsNeeded]  # 95 %, by bootstrap over draws and test images

    @property
    def saved(self) -> int:
        """Labels that pretraining saved: those that scratch needs, without those that were used."""
        return max(0, round(self.needed.labels - self.labels))


@dataclass(frozen=True)
class Worth:
    """The answer."""

    points: list[Point]
    gains: list[Gain]  # by number of labels, ascending; empty without scratch or without another arm
    verdict: str  # yes, no, few (only with few labels) or open
    sentence: str

    def point(self, arm: str, labels: int) -> Point | None:
        return next((p for p in self.points if (p.arm, p.labels) == (arm, labels)), None)


Curves = Mapping[str, Mapping[int, Tensor]]  # arm -> number of labels -> right (draws, test images)


def analyze(results: Sequence[CellResult], seed: int = 0) -> Worth:
    """What the finished cells say; it may be fewer than were planned."""
    curves = _curves(results)
    amounts = {result.cell.labels: result.cell.amount for result in results}
    points = [
        _point(arm, amounts[labels], labels, right) for arm, curve in curves.items() for labels, right in curve.items()
    ]
    gains = _gains(curves, amounts, seed)
    verdict = _verdict(gains)
    return Worth(points, gains, verdict, _sentence(verdict, gains, curves))


def _curves(results: Sequence[CellResult]) -> dict[str, dict[int, Tensor]]:
    grouped: dict[str, dict[int, list[CellResult]]] = {arm: {} for arm in TITLES}
    for result in sorted(results, key=lambda result: (result.cell.labels, result.cell.draw)):
        grouped[result.cell.arm].setdefault(result.cell.labels, []).append(result)
    return {
        arm: {labels: torch.stack([result.right for result in group]) for labels, group in curve.items()}
        for arm, curve in grouped.items()
        if curve
    }


def _point(arm: str, amount: str, labels: int, right: Tensor) -> Point:
    low, high = crossed_interval(right)
    each = [100 * x for x in right.double().mean(1).tolist()]
    interval = Interval(max(0.0, 100 * low), min(100.0, 100 * high))
    return Point(arm, amount, labels, len(right), _percent(right), interval, each)


def _percent(right: Tensor) -> float:
    """The accuracy over all draws, (draws, test images)."""
    return 100 * right.double().mean().item()


def crossed_interval(values: Tensor) -> Interval:
    """95 % interval of the mean of values (draws, images), where both draws and images are samples.

    The variances of the mean over draws and over images add up; the degrees of freedom are Welch and Satterthwaite's.
    One draw says nothing of the draws: then the interval is that of the images alone.
    """
    values = values.double()
    draws, images = values.shape
    parts = []
    if draws > 1:
        parts.append((values.mean(1).var().item() / draws, draws - 1))
    if images > 1:
        parts.append((values.mean(0).var().item() / images, images - 1))
    variance, mean = sum(part for part, _ in parts), values.mean().item()
    if variance == 0:
        return Interval(mean, mean)
    degrees = variance**2 / sum(part**2 / free for part, free in parts)
    half = t_quantile(max(1, int(degrees))) * math.sqrt(variance)
    return Interval(mean - half, mean + half)


def _gains(curves: Curves, amounts: Mapping[int, str], seed: int) -> list[Gain]:
    """At each number of labels that scratch was tried with: the best other arm against it."""
    scratch = curves.get(SCRATCH, {})
    others = [arm for arm in curves if arm != SCRATCH]
    gains = []
    for labels, base in scratch.items():
        rivals = {arm: curves[arm][labels] for arm in others if labels in curves[arm]}
        if not rivals:
            continue
        arm, right = max(rivals.items(), key=lambda rival: _percent(rival[1]))
        low, high = crossed_interval(_difference(right, base))
        top1, below = _percent(right), _percent(base)
        gains.append(
            Gain(
                amounts[labels],
                labels,
                arm,
                top1,
                below,
                top1 - below,
                Interval(100 * low, 100 * high),
                labels_needed(_means(scratch), top1 / 100),
                _needed_interval(scratch, right, seed, LabelsNeeded(labels) if low <= 0 else None),
            )
        )
    return gains


def _difference(right: Tensor, base: Tensor) -> Tensor:
    """The difference (draws, images) draw by draw and image by image; a single draw stands for all."""
    if 1 not in (len(right), len(base)):
        draws = min(len(right), len(base))
        right, base = right[:draws], base[:draws]
    return right.double() - base.double()


def _means(curve: Mapping[int, Tensor]) -> dict[int, float]:
    return {labels: right.double().mean().item() for labels, right in curve.items()}


def labels_needed(scratch: Mapping[int, float], accuracy: float) -> LabelsNeeded:
    """The labels at which the curve of scratch reaches an accuracy.

    Args:
        scratch: number of labels -> accuracy from scratch. Where it falls it is taken as level.
        accuracy: on the same scale.
    """
    amounts = sorted(scratch)
    levels: list[float] = []
    for labels in amounts:
        levels.append(max(scratch[labels], levels[-1] if levels else -math.inf))
    if accuracy <= levels[0]:
        return LabelsNeeded(amounts[0], below=True)
    if accuracy > levels[-1]:
        return LabelsNeeded(amounts[-1], above=True)
    place = next(index for index, level in enumerate(levels) if level >= accuracy)
    low, high = levels[place - 1], levels[place]
    share = (accuracy - low) / (high - low)
    logarithm = math.log(amounts[place - 1]) * (1 - share) + math.log(amounts[place]) * share
    return LabelsNeeded(math.exp(logarithm))


def _needed_interval(
    scratch: Mapping[int, Tensor], right: Tensor, seed: int, by_chance: LabelsNeeded | None
) -> tuple[LabelsNeeded, LabelsNeeded]:
    """95 % interval of the labels that scratch needs, from draws and test images drawn with replacement.

    Args:
        scratch: number of labels -> right (draws, test images) from scratch.
        right: of the best use of the encoder.
        seed: decides the samples.
        by_chance: the labels that were used, where the gain may be chance: then it may have saved none. Samples of a
            few draws spread less than draws do, and would not say so.
    """
    draws = generator(seed, "bootstrap")
    images = right.shape[1]
    found: list[LabelsNeeded] = []
    for _ in range(BOOTSTRAPS // _CHUNK):
        weights = torch.stack(
            [
                torch.randint(images, (images,), generator=draws).bincount(minlength=images).float() / images
                for _ in range(_CHUNK)
            ],
            dim=1,
        )  # (images, bootstraps)
        curve = {labels: _resampled(x, weights, draws) for labels, x in scratch.items()}
        accuracy = _resampled(right, weights, draws)
        for number in range(_CHUNK):
            levels = {labels: means[number] for labels, means in curve.items()}
            found.append(labels_needed(levels, accuracy[number]))
    found.sort(key=lambda needed: (needed.above, not needed.below, needed.labels))
    low, high = found[round(0.025 * (len(found) - 1))], found[round(0.975 * (len(found) - 1))]
    return (by_chance if by_chance and low.labels > by_chance.labels else low), high


def _resampled(right: Tensor, weights: Tensor, draws: torch.Generator) -> list[float]:
    """Means (bootstraps) of right (draws, images) over images with these weights and over draws with replacement."""
    means = right.float() @ weights  # (draws, bootstraps)
    chosen = torch.randint(len(right), means.shape, generator=draws)
    return means.gather(0, chosen).mean(0).tolist()


def _verdict(gains: Sequence[Gain]) -> str:
    if not gains:
        return "open"
    better = [gain.interval.low > 0 for gain in gains]
    worse = [gain.interval.high < 0 for gain in gains]
    if all(better):
        return "yes"
    if any(better):
        return "few"
    return "no" if any(worse) else "open"


def _sentence(verdict: str, gains: Sequence[Gain], curves: Curves) -> str:
    """The answer in a sentence or two."""
    if not gains:
        missing = "from scratch" if SCRATCH not in curves else "with the pretrained encoder"
        return f"There is no answer yet: nothing was trained {missing} with the same labels."
    few, many = gains[0], gains[-1]
    if verdict == "yes":
        told = f"Yes: {_compared(few)}" + (f", and {_compared(many)}" if many is not few else "")
        return f"{told}. {_saved(_headline(gains))}"
    if verdict == "few":
        good = [gain for gain in gains if gain.interval.low > 0]
        rest = [gain for gain in gains if gain.interval.low <= 0]
        judged = "which is worse" if rest[-1].interval.high < 0 else "which is no gain beyond chance"
        return f"In part: {_compared(good[0])}, but {_compared(rest[-1])}, {judged}. {_saved(_headline(good))}"
    if verdict == "no":
        worst = min(gains, key=lambda gain: gain.interval.high)
        return f"No: {_compared(worst)}. With these labels training from scratch is the better choice."
    best = max(gains, key=lambda gain: gain.gain)
    return f"It does not show: {_compared(best)}, and no difference here is beyond chance."


def _compared(gain: Gain) -> str:
    return (
        f"with {gain.labels:,} labels ({gain.amount}) pretraining gives {gain.top1:.1f} % ({TITLES[gain.arm]}) instead "
        f"of {gain.scratch:.1f} % from scratch ({gain.gain:+.1f} points, 95 % interval {gain.interval.low:+.1f} to "
        f"{gain.interval.high:+.1f})"
    )


def _headline(gains: Sequence[Gain]) -> Gain:
    """The number of labels to state the savings for: the most below all of them."""
    return gains[-2] if len(gains) > 1 else gains[-1]


def _saved(gain: Gain) -> str:
    """What pretraining saved at one number of labels."""
    most = round(gain.needed.labels)
    if gain.needed.above and most > gain.labels:
        return (
            f"From scratch not even all {most:,} labels reach the {gain.top1:.1f} % of {gain.labels:,}: pretraining "
            f"saved more than {most - gain.labels:,} labels."
        )
    if gain.needed.above:
        return f"How many labels from scratch would need for {gain.top1:.1f} % was not measured: more than {most:,}."
    if gain.needed.below:
        return f"From scratch {gain.labels:,} labels reach as much: pretraining saved none."
    low, high = gain.needed_interval
    return (
        f"From scratch it takes about {_rounded(gain.needed.labels):,} labels to reach what {gain.labels:,} give: "
        f"pretraining saved about {_rounded(gain.saved):,} labels (95 % interval {describe_saved(low, gain.labels)} to "
        f"{describe_saved(high, gain.labels)})."
    )


def describe_saved(needed: LabelsNeeded, labels: int) -> str:
    """Labels saved at one end of an interval."""
    saved = max(0, _rounded(needed.labels) - labels)
    return f"more than {saved:,}" if needed.above else f"{saved:,}"


def _rounded(labels: float) -> int:
    """Two significant digits: more is not known."""
    if labels < 10:
        return round(labels)
    digits = int(math.log10(labels)) - 1
    return int(round(labels / 10**digits) * 10**digits)
