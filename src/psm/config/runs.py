"""Settings of `psm runs`."""

from dataclasses import dataclass

from psm.config.evaluation import SCORES
from psm.config.keys import key


@dataclass
class RunsConfig:
    """psm runs: what was trained. `psm runs [FOLDER]` lists runs, `best` prints the best one's folder, `compare A B`
    sets two side by side, `serve` opens a live page."""

    folder: str = key("runs", "where the runs are, at any depth; `psm runs FOLDER` is short for it", filled=True)
    by: str = key("linear", "the score that best and the order of the list go by", choices=(*SCORES, "accuracy"))
    sort: str = key(
        "age", "order of the list: newest first, by name, or by the score of `by`", choices=("age", "name", "score")
    )
    port: int = key(8719, "of `serve`: port of the page on this machine; 0: any free one", at_least=0, at_most=65535)
