"""What is scored, and its features: extracted when a score first asks for them, and kept for the next."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from psm.config.schema import EvaluateConfig, LinearConfig, ViewsConfig
from psm.data import ImageStore
from psm.evaluation.features import Prepare, check_finite_features, extract
from psm.utils.indices import evenly_spaced
from psm.utils.progress import StageBar
from psm.utils.seeding import generator
from psm.views.transform import Views


@dataclass(frozen=True)
class Subject:
    """Something to score: an encoder or a baseline."""

    name: str
    module: nn.Module  # to features
    protocol: dict[str, Any]  # what the protocol says of it
    linear: LinearConfig
    projector: nn.Module | None = None  # from features to projections, where it is known
    has_rank: bool = True  # False for raw pixels, which are no features


@dataclass(frozen=True)
class Part:
    """Some images of a store, by index, with their labels where they are known."""

    images: ImageStore
    rows: Tensor  # (N,)
    known_labels: Tensor | None

    @classmethod
    def whole(cls, images: ImageStore) -> "Part":
        return cls(images, torch.arange(len(images)), images.labels)

    def take(self, places: Tensor) -> "Part":
        """Those at these places of the part."""
        labels = None if self.known_labels is None else self.known_labels[places]
        return Part(self.images, self.rows[places], labels)

    @property
    def labels(self) -> Tensor:
        """Labels (N,); asked for only where `evaluate` has made sure of them."""
        assert self.known_labels is not None
        return self.known_labels

    def __len__(self) -> int:
        return len(self.rows)


@dataclass(frozen=True)
class EvaluationData:
    """The images that classifiers are trained on, and those that are scored (none without labels)."""

    train: Part
    test: Part | None
    classes: int


@dataclass(frozen=True)
class SubjectFeatures:
    """Features of a subject. Every score of a subject shares those of the plain images."""

    subject: Subject
    data: EvaluationData
    views: Views  # of which the plain one is used
    training_views: Views  # as in pretraining
    config: EvaluateConfig
    bars: StageBar
    device: torch.device

    @cached_property
    def train(self) -> Tensor:
        """Of the training images, (N, F), float32 on the CPU."""
        return self._extract(self.data.train, self.views.plain)

    @cached_property
    def test(self) -> Tensor:
        """Of the test images, (M, F), float32 on the CPU."""
        assert self.data.test is not None
        return self._extract(self.data.test, self.views.plain)

    @property
    def labels(self) -> tuple[Tensor, Tensor]:
        """Of the training and of the test images."""
        assert self.data.test is not None
        return self.data.train.labels, self.data.test.labels

    def of_epochs(self, augment: bool, rows: Tensor | None = None) -> Callable[[int], Tensor]:
        """A function of the epoch: training features, of the images at ``rows`` or, augmented or not, of all."""
        if augment:
            return self._augmented()
        train = self.train if rows is None else self.train[rows]
        return lambda epoch: train

    def _augmented(self) -> Callable[[int], Tensor]:
        """Training features (N, F) of an epoch from random crops and flips."""
        no_color = ViewsConfig(preset="small", size=self.views.size, color_jitter=0.0, grayscale=0.0)
        crops = Views(no_color, self.data.train.images.shape[-1], self.views.mean, self.views.std)

        def of_epoch(epoch: int) -> Tensor:
            draws = generator(self.config.seed, "linear views", epoch)

            def prepare(images: Tensor) -> Tensor:
                return crops.apply(images, crops.sample_params(len(images), draws, views=1, device=images.device))[0]

            return self._extract(self.data.train, prepare)

        return of_epoch

    def sample(self, most: int, space: str) -> Tensor:
        """Features or projections (n, F) of at most so many evenly spaced training images."""
        places = evenly_spaced(len(self.data.train), most)
        if space == "features" and (len(places) == len(self.data.train) or "train" in vars(self)):
            return self.train[places]
        return self._extract(self.data.train.take(places), self.views.plain, space)

    def of_views(self, most: int, views: int, space: str) -> Tensor:
        """Features or projections (n, q, F) of q random views of at most so many evenly spaced training images."""
        part = self.data.train.take(evenly_spaced(len(self.data.train), most))
        draws = generator(self.config.seed, "lidar views")

        def prepare(images: Tensor) -> Tensor:
            params = self.training_views.sample_params(len(images), draws, views=views, device=images.device)
            return self.training_views.apply(images, params).transpose(0, 1).flatten(0, 1)

        found = self._extract(part, prepare, space, batch_size=max(1, self.config.batch_size // views))
        return found.unflatten(0, (len(part), views))

    def _extract(self, part: Part, prepare: Prepare, space: str = "features", batch_size: int | None = None) -> Tensor:
        module = self.subject.module
        if space == "projections":
            assert self.subject.projector is not None
            module = nn.Sequential(module, self.subject.projector)
        with self.bars(f"{self.subject.name}: {space}", len(part)) as advance:
            found = extract(
                module,
                part.images,
                prepare,
                part.rows,
                batch_size=batch_size or self.config.batch_size,
                precision=self.config.precision,
                advance=advance,
            )
        return check_finite_features(found, self.subject.name)
