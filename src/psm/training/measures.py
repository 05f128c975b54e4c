"""What is measured at the end of an epoch: of pretraining the health of the features, and online scores."""

from collections.abc import Sequence
from typing import Any, Generic, Protocol, TypeVar

from psm.data import ImageDataset
from psm.mining.purity import SERVED, finalize
from psm.training.health import HEALTH, feature_health, health_warnings
from psm.training.module import PretrainModule
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
        """Metrics that are measured on rank 0 alone; the other ranks receive them."""

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
        return {**finalize(means), **feature_health(module.outputs.features, module.outputs.projection)}

    def score(self, module: PretrainModule, epoch: int) -> dict[str, float]:
        due = epoch % module.config.monitor.every == 0 or epoch == module.config.epochs
        return online_scores(module, self.data) if due else {}

    def warnings(self, history: Sequence[dict[str, Any]]) -> list[str]:
        return health_warnings(history)
