"""The scores of a run for its model card, each with the protocol that it was measured by."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from psm.exporting.source import Source
from psm.utils.files import read_lines

KINDS = {
    "knn": "kNN",
    "linear": "linear layer",
    "logistic": "logistic regression",
    "few_labels": "few labels",
    "retrieval": "retrieval",
    "clusters": "clusters",
}
# What a score may hold: its name, what it is called, and what follows the number.
VALUES = {"top1": ("top-1", " %"), "top5": ("top-5", " %"), "map": ("mAP", " %"), "nmi": ("NMI", "")}
VALUES |= {"rankme": ("RankMe", ""), "lidar": ("LiDAR", "")}
# Settings of a protocol that a reader needs to compare scores, and what they are called.
SETTINGS = {
    "labels": "labels:",
    "classifier": "classifier:",
    "draws": "draws:",
    "k": "k =",
    "temperature": "temperature",
    "c": "C =",
    "epochs": "epochs",
    "lr": "learning rate",
    "batch_size": "batch size",
    "weight_decay": "weight decay",
    "epoch": "encoder of epoch",
    "seed": "seed",
}


@dataclass(frozen=True)
class ScoreRow:
    """A score in words."""

    record: dict[str, Any]  # a line of scores.jsonl

    @property
    def title(self) -> str:
        return KINDS.get(self.record["score"], self.record["score"])

    @property
    def values(self) -> str:
        """Every value with its 95 % interval, where that was measured."""
        return ", ".join(self._value(name) for name in VALUES if self.record.get(name) is not None)

    def _value(self, name: str) -> str:
        title, unit = VALUES[name]
        digits = 3 if abs(self.record[name]) < 1 else 1
        interval = self.record.get(f"{name}_interval")
        ends = f" ({interval[0]:.{digits}f} to {interval[1]:.{digits}f})" if interval else ""
        return f"{title} {self.record[name]:.{digits}f}{unit}{ends}"

    @property
    def data(self) -> str:
        name = str(self.record["protocol"].get("data", ""))
        return Path(name).name or name

    @property
    def protocol(self) -> str:
        """Data, number of images and the settings of the score, in words."""
        known = self.record["protocol"]
        words = [self.data]
        if known.get("train_images") and known.get("test_images"):
            words.append(f"{known['train_images']:,} training and {known['test_images']:,} test images")
        words += [f"{name} {known[key]}" for key, name in SETTINGS.items() if known.get(key) is not None]
        return ", ".join(words)

    def model_index(self) -> dict[str, Any]:
        """The score as an entry of the Hub's model index."""
        metrics = [
            {
                "type": "accuracy" if name.startswith("top") else name,
                "name": f"{self.title} {VALUES[name][0]}",
                "value": round(self.record[name], 3),
            }
            for name in VALUES
            if self.record.get(name) is not None
        ]
        return {
            "task": {"type": "image-classification", "name": f"{self.title} on frozen features"},
            "dataset": {"type": self.data, "name": self.data},
            "metrics": metrics,
        }


def score_rows(source: Source) -> list[ScoreRow]:
    """The newest score of each kind and protocol of this encoder: baselines and other epochs are left out."""
    if source.run is None:
        return []
    newest: dict[tuple[str, str], ScoreRow] = {}
    for record in read_lines(source.run.scores):
        protocol = record.get("protocol", {})
        own = record.get("of") == source.info.method and protocol.get("epoch") == source.info.epoch
        if own and "score" in record:
            row = ScoreRow(record)
            newest[record["score"], row.protocol] = row
    return [row for row in newest.values() if row.values]
