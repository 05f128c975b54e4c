"""The scores of a run for its model card, each with the protocol that it was measured by."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from psm.exporting.source import Source
from psm.utils.files import read_lines

TITLES = {"knn": "kNN", "linear": "linear layer"}
# Settings of a protocol that a reader needs to compare scores, and what they are called.
SETTINGS = {
    "k": "k =",
    "temperature": "temperature",
    "epochs": "epochs",
    "lr": "learning rate",
    "batch_size": "batch size",
    "weight_decay": "weight decay",
    "epoch": "encoder of epoch",
    "seed": "seed",
}


@dataclass(frozen=True)
class ScoreRow:
    """The newest score of a kind, in words."""

    record: dict[str, Any]

    @property
    def title(self) -> str:
        return TITLES.get(self.record["score"], self.record["score"])

    @property
    def top1(self) -> str:
        return self._percent("top1")

    @property
    def top5(self) -> str:
        return self._percent("top5")

    def _percent(self, name: str) -> str:
        value, interval = self.record.get(name), self.record.get(f"{name}_interval")
        if value is None:
            return "–"
        return f"{value:.1f}" + (f" ({interval[0]:.1f} to {interval[1]:.1f})" if interval else "")

    @property
    def data(self) -> str:
        name = str(self.record["protocol"].get("data", ""))
        return Path(name).name or name

    @property
    def protocol(self) -> str:
        """Data, number of images and the settings of the score, in words."""
        known = self.record["protocol"]
        words = [self.data]
        if "train_images" in known and "test_images" in known:
            words.append(f"{known['train_images']:,} training and {known['test_images']:,} test images")
        words += [f"{name} {known[key]}" for key, name in SETTINGS.items() if known.get(key) is not None]
        return ", ".join(words)

    def model_index(self) -> dict[str, Any]:
        """The score as an entry of the Hub's model index."""
        metrics = [
            {"type": "accuracy", "name": f"{self.title} top-{n}", "value": round(self.record[f"top{n}"], 2)}
            for n in (1, 5)
            if self.record.get(f"top{n}") is not None
        ]
        return {
            "task": {"type": "image-classification", "name": f"{self.title} on frozen features"},
            "dataset": {"type": self.data, "name": self.data},
            "metrics": metrics,
        }


def score_rows(source: Source) -> list[ScoreRow]:
    """The newest score of each kind of this encoder: baselines and other epochs of the run are left out."""
    if source.run is None:
        return []
    newest: dict[str, ScoreRow] = {}
    for record in read_lines(source.run.scores):
        protocol = record.get("protocol", {})
        own = record.get("of") == source.info.method and protocol.get("epoch") == source.info.epoch
        if own and "score" in record:
            newest[record["score"]] = ScoreRow(record)
    return list(newest.values())
