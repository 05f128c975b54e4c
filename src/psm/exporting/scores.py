"""The scores of a run for its model card, each with its 95 % interval and the protocol that it was measured by."""

from dataclasses import dataclass
from typing import Any

from psm.data.location import data_name
from psm.evaluation.scores import Score
from psm.exporting.source import Source
from psm.utils.files import read_lines

# What a score may hold: what it is called, and what follows the number.
VALUES = {
    "top1": ("top-1", " %"),
    "top5": ("top-5", " %"),
    "map": ("mAP", " %"),
    "nmi": ("NMI", ""),
    "rankme": ("RankMe", ""),
    "lidar": ("LiDAR", ""),
}


@dataclass(frozen=True)
class ScoreRow:
    """A score in words."""

    score: Score

    @property
    def title(self) -> str:
        return self.score.title.partition(",")[0]

    @property
    def values(self) -> str:
        return ", ".join(map(self._value, self.score.estimates))

    def _value(self, name: str) -> str:
        title, unit = VALUES.get(name, (name, ""))
        estimate = self.score.estimates[name]
        digits = 3 if abs(estimate.value) < 1 else 1
        interval = estimate.interval
        ends = "" if interval is None else f" ({interval[0]:.{digits}f} to {interval[1]:.{digits}f})"
        return f"{title} {estimate.value:.{digits}f}{unit}{ends}"

    @property
    def data(self) -> str:
        return data_name(self.score.protocol.get("data", ""))

    @property
    def protocol(self) -> str:
        """The settings of the score, data and number of images, in words."""
        known = self.score.protocol
        counts = [f"{known[f'{part}_images']:,} {part}" for part in ("train", "test") if known.get(f"{part}_images")]
        images = f"{self.data} ({' and '.join(counts)} images)" if counts else self.data
        return "; ".join(filter(None, (self.score.describe(), images)))

    def model_index(self) -> dict[str, Any]:
        """The score as an entry of the Hub's model index."""
        metrics = [
            {
                "type": "accuracy" if name in ("top1", "top5") else name,
                "name": f"{self.title} {VALUES.get(name, (name, ''))[0]}",
                "value": round(estimate.value, 3),
            }
            for name, estimate in self.score.estimates.items()
        ]
        return {
            "task": {"type": "image-feature-extraction", "name": "frozen features"},
            "dataset": {"type": self.data, "name": self.data},
            "metrics": metrics,
        }


def score_rows(source: Source) -> list[ScoreRow]:
    """The newest score of each kind and protocol of this encoder: baselines and other epochs are left out."""
    if source.run is None:
        return []
    newest: dict[tuple[str, str], ScoreRow] = {}
    for line in read_lines(source.run.scores):
        own = line.get("of") == source.info.method and line.get("protocol", {}).get("epoch") == source.info.epoch
        if own and "score" in line:
            row = ScoreRow(Score.from_record(line))
            newest[row.title, row.protocol] = row
    return [row for row in newest.values() if row.score.estimates]
