"""What is measured at the end of an epoch: of pretraining the health of the features, and online scores."""

from collections.abc import Sequence
from typing import Any, Generic, Protocol, TypeVar

from torch import Tensor

from psm.data import ImageDataset
from psm.data.loader import rank_slice
from psm.mining.purity import SERVED, finalize
from psm.training.distributed import gather_rows, processes
from psm.training.health import HEALTH, feature_health, health_warnings, sampling_step
from psm.training.module import PretrainModule, StepOutputs
from psm.training.online_scores import online_score_names, online_scores
from psm.training.run_module import RunModule

Module = TypeVar("Module", bound=RunModule, contravariant=True)


class Measures(Protocol, Generic[Module]):
    """What a kind of training measures at the end of an epoch, beside its rate and its learning rate."""

    def names(self, module: Module) -> list[str]:
        """Every metric that it measures."""

    def measure(self, module: Module, means: dict[str, float]) -> dict[str, Any]:
        """The metrics of an epoch, from the means over its steps; on every rank."""

    def score(self, module: Module, epoch: int) -> dict[str, float]:
        """Scores of the networks on other images than the epoch's; on every rank, which share the images out."""

    def warnings(self, history: Sequence[dict[str, Any]]) -> list[str]:
        """Sentences about the last of these records; what stands before the colon is the kind of trouble."""


class PretrainMeasures:
    """Loss and mining, health of the features, and online scores where labels exist."""

    def __init__(self, data: ImageDataset):
        self.data = data

    def names(self, module: PretrainModule) -> list[str]:
        means = [name for name in module.epoch_mean.names if name != SERVED]
        return [*means, *HEALTH, *online_score_names(module, self.data)]

    def measure(self, module: PretrainModule, means: dict[str, float]) -> dict[str, Any]:
        return {**finalize(means), **feature_health(sampled_features(module.outputs), module.outputs.projection)}

    def score(self, module: PretrainModule, epoch: int) -> dict[str, float]:
        due = epoch % module.config.monitor.every == 0 or epoch == module.config.epochs
        return online_scores(module, self.data) if due else {}

    def warnings(self, history: Sequence[dict[str, Any]]) -> list[str]:
        return health_warnings(history)


def sampled_features(outputs: StepOutputs) -> Tensor:
    """Features (2n, F) of two views of the images of the global batch that health is measured on, on every rank."""
    views, size = outputs.projection.shape[:2]
    features = outputs.features.unflatten(0, (views, -1))[:2].movedim(1, 0)  # (B, 2, F), of this rank
    first = rank_slice(size, processes().rank, processes().count).start
    wanted = [index for index in range(len(features)) if (first + index) % sampling_step(size) == 0]
    return gather_rows(features[wanted]).movedim(0, 1).flatten(0, 1)
