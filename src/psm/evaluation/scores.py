"""A score with its protocol and 95 % interval, as an object and as a line of scores.jsonl."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from psm.config.evaluation import LinearConfig
from psm.evaluation.intervals import Interval, accuracy_interval

ACCURACIES = ("top1", "top5")  # in percent
MEASURES = ("map", "nmi", "rankme", "lidar")

# Kind of score -> its name in tables.
TITLES = {
    "knn": "kNN",
    "linear": "linear",
    "logistic": "logistic",
    "few_labels": "few labels",
    "retrieval": "mAP, %",
    "clusters": "NMI",
    "rankme": "RankMe",
    "lidar": "LiDAR",
}

PAPER = "paper"  # the name of the paper's linear protocol
ONE_RATE = "one rate"
CHOSEN_RATE = "rate chosen on held-out training images"


@dataclass(frozen=True)
class Estimate:
    """A measured value with its 95 % interval; None where it is unknown."""

    value: float
    interval: Interval | None = None


@dataclass(frozen=True)
class Score:
    """One score with the protocol that it was measured by."""

    of: str  # the method of the encoder, "untrained encoder" or "raw pixels"
    score: str  # knn, linear, logistic, few_labels, retrieval, clusters, rankme or lidar
    estimates: Mapping[str, Estimate]  # top1 and top5 in percent; or map (in percent), nmi, rankme, lidar
    protocol: dict[str, Any]

    @property
    def top1(self) -> float:
        """Top-1 accuracy in percent, of a score that is one."""
        return self.estimates["top1"].value

    @property
    def top5(self) -> float:
        """Top-5 accuracy in percent, of a score that is one."""
        return self.estimates["top5"].value

    @property
    def is_accuracy(self) -> bool:
        return "top1" in self.estimates

    @property
    def main(self) -> Estimate:
        """Top-1, or the value of a measure."""
        return next(iter(self.estimates.values()))

    @property
    def held_out(self) -> bool:
        """True if it is of held-out training images instead of the test images (images.holdout)."""
        return bool((self.protocol.get("images") or {}).get("holdout"))

    @property
    def title(self) -> str:
        return TITLES.get(self.score, self.score)

    def record(self) -> dict[str, Any]:
        """As a line of scores.jsonl: values by name, and their intervals as [low, high] under NAME_interval."""
        values = {name: estimate.value for name, estimate in self.estimates.items()}
        intervals = {
            f"{name}_interval": list(estimate.interval)
            for name, estimate in self.estimates.items()
            if estimate.interval is not None
        }
        return {"of": self.of, "score": self.score, **values, **intervals, "protocol": self.protocol}

    @classmethod
    def from_record(cls, line: Mapping[str, Any]) -> "Score":
        """From a line of scores.jsonl. Lines of before there were intervals get those of their test images."""
        protocol = dict(line.get("protocol", {}))
        estimates = {}
        for name in (*ACCURACIES, *MEASURES):
            if name not in line:
                continue
            stored, images = line.get(f"{name}_interval"), protocol.get("test_images")
            interval = Interval(*stored) if stored else None
            if interval is None and name in ACCURACIES and images:
                interval = accuracy_interval(line[name], images)
            estimates[name] = Estimate(line[name], interval)
        return cls(line["of"], line["score"], estimates, protocol)

    def describe(self) -> str:
        """The protocol in a few words."""
        words = _DESCRIPTIONS[self.score](self.protocol) if self.score in _DESCRIPTIONS else ""
        notes = []
        if self.held_out:
            notes.append("on held-out training images")
        if self.protocol.get("which") not in (None, "last"):
            notes.append(f"checkpoint {self.protocol['which']}")
        return ", ".join(filter(None, (words, *notes)))


def linear_name(protocol: Mapping[str, Any]) -> str:
    """The name of a linear protocol: the paper's where all of its settings are, else how its rate came about."""
    if len(protocol.get("lr_grid") or ()) > 1:
        return CHOSEN_RATE
    paper = LinearConfig()
    names = ("epochs", "batch_size", "lr", "momentum", "weight_decay", "augment")
    return PAPER if all(protocol.get(name) == getattr(paper, name) for name in names) else ONE_RATE


def _describe_linear(used: Mapping[str, Any]) -> str:
    name = used.get("name") or linear_name(used)
    settings = f"{used['epochs']} epochs, lr {used['lr']:g}"
    if used.get("augment"):
        settings += ", augmented"
    if name == CHOSEN_RATE:
        return f"{settings}, best of {len(used['lr_grid'])} on held-out training images"
    return f"the paper's protocol: {settings}" if name == PAPER else settings


def _describe_logistic(used: Mapping[str, Any]) -> str:
    grid = used.get("c_grid") or ()
    return f"C = {used['c']:g}" + (f", best of {len(grid)} on held-out training images" if len(grid) > 1 else "")


def _describe_few_labels(used: Mapping[str, Any]) -> str:
    draws = f"mean of {used['draws']} draws" if used["draws"] > 1 else "one draw"
    return f"{used['labels']} ({used['labeled_images']:,} labels), {TITLES[used['classifier']]}, {draws}"


def _describe_retrieval(used: Mapping[str, Any]) -> str:
    gallery = "the other test images" if used["gallery"] == "test" else "the training images"
    return f"retrieval of each test image's class from {gallery}"


_DESCRIPTIONS = {
    "knn": lambda used: f"k = {used['k']}, T = {used['temperature']:g}",
    "linear": _describe_linear,
    "logistic": _describe_logistic,
    "few_labels": _describe_few_labels,
    "retrieval": _describe_retrieval,
    "clusters": lambda used: f"k-means clusters, k = {used['k']}, best of {used['starts']} starts",
    "rankme": lambda used: f"{used['space']} of {used['images_used']:,} training images",
    "lidar": lambda used: f"{used['space']} of {used['images_used']:,} training images, {used['views']} views each",
}
