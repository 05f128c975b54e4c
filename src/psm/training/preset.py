"""Choosing the preset of a run: by name, or by the device that it will train on."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from psm.config import merge as settings
from psm.config.keys import rows, show
from psm.config.presets import LAPTOP, PAPER, PRETRAIN_PRESETS
from psm.config.schema import PretrainConfig
from psm.models.init_weights import InitialWeights


@dataclass(frozen=True)
class PresetChoice:
    """A preset, why it was chosen, and which keys it decides: those that the user did not give."""

    name: str
    reason: str
    settings: Mapping[str, Any]

    def beside(self, weights: InitialWeights | None) -> "PresetChoice":
        """What is left to decide beside ``init=``: weights say which encoder they are, a run has all its settings."""
        if weights is None:
            return self
        left = {} if weights.settings else {key: value for key, value in self.settings.items() if key != "encoder"}
        return replace(self, settings=left)

    def lines(self, images: int, size: int) -> list[str]:
        """What the plan says of it for so many images of this side in pixels; nothing if all was given."""
        idle = {
            *(["images.limit"] if images < self.settings.get("images.limit", 0) else []),
            *(["images.max_size"] if size < self.settings.get("images.max_size", 0) else []),
        }
        decided = ", ".join(f"{key}={show(value)}" for key, value in self.settings.items() if key not in idle)
        if self.name == LAPTOP.name and not decided:
            return []
        what = decided or PAPER.about
        other = LAPTOP if self.name == PAPER.name else PAPER
        return [
            f"preset {self.name}, {self.reason}: {what}. Any key that is given wins; preset={other.name} is "
            f"{other.about}."
        ]


def choose_preset(
    asked: PretrainConfig, overrides: Sequence[Mapping[str, Any]], images_given: bool = False
) -> PresetChoice:
    """The preset of a run that is about to begin.

    Args:
        asked: the merged overrides.
        overrides: what the user gave, nested or dotted.
        images_given: whether the images come from Python, in memory: they are then taken as they are.
    """
    name, reason = _name(asked)
    given = _given_keys(overrides)
    # The built-in images are drawn: a limit would ask for more of them.
    as_they_are = images_given or asked.data == "shapes"
    decided = {
        key: value
        for key, value in PRETRAIN_PRESETS[name].settings.items()
        if key not in given and not (as_they_are and key.startswith("images."))
    }
    return PresetChoice(name, reason, decided)


def _name(asked: PretrainConfig) -> tuple[str, str]:
    """The preset's name, and why it is that one."""
    if asked.preset != "auto":
        return asked.preset, "as given"
    if asked.accelerator == "cpu":
        return LAPTOP.name, "because of accelerator=cpu"
    if asked.accelerator != "auto":
        return PAPER.name, f"because of accelerator={asked.accelerator}"
    if torch.cuda.is_available() or torch.backends.mps.is_available():
        return PAPER.name, "because there is a GPU"
    return LAPTOP.name, "because no GPU was found"


def _given_keys(overrides: Sequence[Mapping[str, Any]]) -> set[str]:
    known = {row.key: row for row in rows(PretrainConfig)}
    return {dotted for override in overrides for dotted, _ in settings.flatten(override, known)}
