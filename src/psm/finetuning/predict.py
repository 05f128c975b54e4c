"""`psm predict`: the most probable classes of every image, in bounded memory whatever the number of images."""

import csv
import io
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from psm.config import merge as settings
from psm.config.embed import EveryImageConfig
from psm.config.predict import PredictConfig
from psm.config.schema import ViewsConfig
from psm.data import ImageDataset, ImageStore, decode
from psm.data.from_torch import from_torch
from psm.data.location import absolute_data
from psm.data.stream import ImageStream, image_stream
from psm.embedding.embed import AHEAD, UNREADABLE, images_config
from psm.embedding.overlap import read_ahead
from psm.evaluation.calibration import BINS, confidence_bins
from psm.evaluation.features import check_finite_features, check_finite_weights, extract
from psm.models.classifier import Classifier, calibrated, find_classifier, load_classifier
from psm.models.factory import prefers_channels_last
from psm.utils.devices import find_device
from psm.utils.errors import UserError
from psm.utils.files import output_file, write_atomically, write_text_atomically
from psm.utils.progress import counting_images
from psm.utils.statistics import Interval, wilson_interval
from psm.views.transform import Views

log = logging.getLogger("psm")


@dataclass(frozen=True)
class KnownLabels:
    """How the predictions compare with labels that the data have."""

    images: int  # whose label is a class of the classifier
    top1: float  # in percent
    interval: Interval  # 95 %, in percent
    ece: float  # expected calibration error, in percent


@dataclass(frozen=True)
class Prediction:
    """What was predicted."""

    file: Path | None
    images: int
    classes: list[str]  # of the classifier
    counts: list[int]  # images that each class is predicted for
    names: list[str]  # of the images; empty where a file was written
    top: Tensor  # (N, k) the most probable classes; empty where a file was written
    probabilities: Tensor  # (N, k) calibrated
    unreadable: list[tuple[str, str]]  # (path, reason)
    trained_on: bool  # True if the classifier was trained on images of this data
    known: KnownLabels | None  # None where the data have no labels of these classes
    calibration: dict[str, Any]  # temperature and error, as measured when the classifier was trained


def predict(
    checkpoint: str | Path,
    data: str | Path | Tensor | np.ndarray | ImageStore | ImageDataset | Dataset,
    out: str | Path | None = None,
    encoder: nn.Module | None = None,
    **keys: Any,
) -> Prediction:
    """The most probable classes of every image of a data set.

    Examples:
        >>> found = psm.predict("runs/clf", "photos")  # doctest: +SKIP
        >>> found.names, found.top, found.probabilities  # doctest: +SKIP

    Args:
        checkpoint: run folder of `psm finetune`, classifier.safetensors or checkpoint of such a run.
        data: a folder, an image file, the name of a set, uint8 images (N, 3, H, W), a loaded data set, or a map-style
            `torch.utils.data.Dataset` of images.
        out: CSV file to write; None: the predictions are returned.
        encoder: receives the weights where the classifier has a module of yours instead of a name.
        keys: those of `psm predict`, nested ones as dictionaries.
    """
    given = {**keys, "checkpoint": str(checkpoint), "out": "" if out is None else str(out)}
    if isinstance(data, (str, Path)):
        return run_prediction({**given, "data": str(data)}, encoder=encoder, to_file=out is not None)
    if isinstance(data, (Tensor, np.ndarray)):
        data = ImageStore(data)
    if isinstance(data, ImageStore):
        data = ImageDataset("images", data, None, ())
    return run_prediction(given, data=data, encoder=encoder, to_file=out is not None)


def run_prediction(
    *overrides: Mapping[str, Any],
    data: ImageDataset | Dataset | None = None,
    encoder: nn.Module | None = None,
    to_file: bool = True,
) -> Prediction:
    """Predict by the merged overrides.

    Args:
        overrides: nested keys, the later ones winning.
        data: used instead of what the key of that name says.
        encoder: receives the weights of a network of the user's own.
        to_file: write ``out``; otherwise the result holds all predictions.
    """
    first = settings.build(PredictConfig, *overrides)
    out = _check_out(first) if to_file else None
    if not first.checkpoint:
        raise UserError("checkpoint= is missing: give a run folder of `psm finetune`, for example checkpoint=runs/clf.")
    if not first.data and data is None:
        raise UserError("data= is missing: name a folder of images.")
    device = find_device(first.accelerator)
    file = find_classifier(first.checkpoint)
    classifier = load_classifier(file, encoder)
    check_finite_weights(classifier, f"checkpoint={file}")
    if prefers_channels_last(device):
        classifier.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    config = settings.build(PredictConfig, *overrides, base=PredictConfig(images=images_config(file)))
    images = replace(config.images, size=config.images.size or classifier.info.encoder.size)
    if isinstance(data, Dataset):
        data = from_torch(data, images, config.progress)
    with _open(data, config.data, images, config.progress) as stream:
        work = _Predictor(classifier.to(device), stream, config)
        if out is None:
            kept = list(work.batches())
            return work.result(None, kept)
        write_atomically(out, work.write)
        _write_unreadable(out.with_name(out.name + UNREADABLE), work.unreadable)
        return work.result(out, [])


def _check_out(config: PredictConfig) -> Path:
    """The file to write; refused before anything is computed if it cannot be written."""
    if not config.out:
        raise UserError("out= is missing: name the CSV file to write, for example out=labels.csv.")
    out = output_file(config.out, Path("labels.csv"), config.overwrite)
    if out.suffix.lower() != ".csv":
        raise UserError(f"out={out} must end in .csv.")
    return out


@contextmanager
def _open(
    data: ImageDataset | None, name: str | list[str], images: EveryImageConfig, progress: bool
) -> Iterator[ImageStream]:
    """The images of a data set or of one file."""
    path = Path(name if isinstance(name, str) else "").expanduser()
    if data is None and path.is_file() and path.suffix.lower() in decode.EXTENSIONS:
        with decode.quiet_pillow():
            yield _one_file(path, images.size or 32)
        return
    with image_stream(name if data is None else data, images, progress) as stream:
        yield stream


def _one_file(path: Path, size: int) -> ImageStream:
    def read(indices: np.ndarray) -> tuple[np.ndarray, list[tuple[int, str]]]:
        try:
            return decode.decode(path, size)[None], []
        except decode.Unreadable as error:
            return np.empty((0, 3, size, size), dtype=np.uint8), [(0, str(error))]

    return ImageStream(path.name, path.parent, size, [path.name], None, (), "", read)


@dataclass(frozen=True)
class _Batch:
    """Predictions of the images of a batch that could be read."""

    rows: list[int]  # of the stream
    top: Tensor  # (B, k)
    probabilities: Tensor  # (B, k)


class _Predictor:
    """Computes the predictions batch by batch and counts what they say."""

    def __init__(self, classifier: Classifier, stream: ImageStream, config: PredictConfig):
        self.classifier, self.stream, self.config = classifier, stream, config
        info = classifier.info
        self.classes = info.classes
        self.views = Views(ViewsConfig(size=info.encoder.size), stream.size, info.encoder.mean, info.encoder.std)
        self.labels = _matched_labels(stream, self.classes)
        self.unreadable: list[tuple[str, str]] = []
        self.images = 0
        self.counts = torch.zeros(len(self.classes), dtype=torch.int64)
        self.bins = torch.zeros(BINS, 3, dtype=torch.float64)  # images, confidence, right; of labeled images

    def batches(self) -> Iterator[_Batch]:
        """Predictions in the order of the images; later batches are decoded while the classifier computes."""
        size, total = self.config.batch_size, len(self.stream)
        indices = (np.arange(start, min(start + size, total)) for start in range(0, total, size))
        with counting_images("predicting", total, self.config.progress) as done:
            for rows, (pixels, failures) in read_ahead(self.stream.read, indices, AHEAD):
                failed = {index for index, _ in failures}
                self.unreadable += [(self.stream.path(index), reason) for index, reason in failures]
                if len(pixels):
                    yield self._predict([row for row in rows.tolist() if row not in failed], torch.from_numpy(pixels))
                done(int(rows[-1]) + 1)
        self._check_unreadable()

    def _predict(self, rows: list[int], pixels: Tensor) -> _Batch:
        logits = extract(
            self.classifier, ImageStore(pixels), self.views, None, self.config.batch_size, self.config.precision
        )
        check_finite_features(logits, f"checkpoint={self.config.checkpoint}")
        probabilities = calibrated(logits, self.classifier.info.temperature)
        self.images += len(rows)
        self.counts += probabilities.argmax(1).bincount(minlength=len(self.classes))
        if self.labels is not None:
            labels = self.labels[rows]
            known = labels >= 0
            bins = confidence_bins(probabilities[known], labels[known])
            self.bins += torch.tensor([[b.images, b.images * b.confidence, b.images * b.accuracy] for b in bins])
        best = probabilities.topk(min(self.config.top, len(self.classes)), dim=1)
        return _Batch(rows, best.indices, best.values)

    def _check_unreadable(self) -> None:
        """Refuse data of which no image, or a larger share than allowed, could not be read."""
        failed, total, most = len(self.unreadable), len(self.stream), self.config.images.max_unreadable
        if self.images and failed <= most * total:
            return
        examples = "; ".join(f"{path} ({reason})" for path, reason in self.unreadable[:3])
        if not self.images:
            raise UserError(f"None of the {total:,} images of {self.stream.name} can be read: {examples}.")
        raise UserError(
            f"{failed:,} of {total:,} images of {self.stream.name} cannot be read, more than "
            f"images.max_unreadable={most:g} allows: {examples}. Replace them, or raise images.max_unreadable."
        )

    def write(self, file: BinaryIO) -> None:
        """Write all predictions as CSV, a batch at a time."""
        text = io.TextIOWrapper(file, encoding="utf-8", newline="", write_through=True)
        writer = csv.writer(text, lineterminator="\n")
        places = range(2, min(self.config.top, len(self.classes)) + 1)
        header = ["image", "class", "probability"]
        header += [f"{name}_{place}" for place in places for name in ("class", "probability")]
        writer.writerow([*header, *(["label"] if self.labels is not None else [])])
        for batch in self.batches():
            for row, top, shares in zip(batch.rows, batch.top.tolist(), batch.probabilities.tolist(), strict=True):
                pairs = zip(top, shares, strict=True)
                cells = [cell for place, share in pairs for cell in (self.classes[place], f"{share:.6f}")]
                writer.writerow([self.stream.path(row), *cells, *self._label(row)])
        text.detach()

    def _label(self, row: int) -> list[str]:
        if self.labels is None or self.stream.labels is None:
            return []
        label = int(self.stream.labels[row])
        return ["" if label < 0 else self.stream.classes[label]]

    def result(self, file: Path | None, kept: list[_Batch]) -> Prediction:
        """The whole, once all batches are done."""
        info = self.classifier.info
        return Prediction(
            file=file,
            images=self.images,
            classes=self.classes,
            counts=self.counts.tolist(),
            names=[self.stream.path(row) for batch in kept for row in batch.rows],
            top=torch.cat([batch.top for batch in kept]) if kept else torch.empty(0, 0, dtype=torch.int64),
            probabilities=torch.cat([batch.probabilities for batch in kept]) if kept else torch.empty(0, 0),
            unreadable=self.unreadable,
            trained_on=bool(self.config.data) and absolute_data(self.config.data) == info.encoder.data,
            known=self._known(),
            calibration={"temperature": info.temperature, **info.scores},
        )

    def _known(self) -> KnownLabels | None:
        images, confidence, right = self.bins.unbind(1)
        count, hits = round(images.sum().item()), round(right.sum().item())
        if not count:
            return None
        low, high = wilson_interval(hits, count)
        ece = 100 * (confidence - right).abs().sum().item() / count
        return KnownLabels(count, 100 * hits / count, Interval(100 * low, 100 * high), ece)


def _matched_labels(stream: ImageStream, classes: list[str]) -> Tensor | None:
    """Labels (N,) in the classifier's numbering, -1 where there is none; None where no class has the same name."""
    if stream.labels is None or not set(stream.classes) & set(classes):
        return None
    number = {name: index for index, name in enumerate(classes)}
    table = np.array([*(number.get(name, -1) for name in stream.classes), -1], dtype=np.int64)
    return torch.from_numpy(table[stream.labels])


def _write_unreadable(path: Path, unreadable: list[tuple[str, str]]) -> None:
    if unreadable:
        write_text_atomically(path, "".join(f"{name}\t{reason}\n" for name, reason in unreadable))
    else:
        path.unlink(missing_ok=True)
