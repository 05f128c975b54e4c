"""A trained encoder as a scikit-learn transformer."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.functional import normalize

from psm.data.any_image import several, square_pixels
from psm.data.decode import quiet_pillow
from psm.embedding.encoder import LoadedEncoder, open_encoder
from psm.embedding.overlap import read_ahead
from psm.utils.devices import num_cores
from psm.utils.errors import UserError

try:
    from sklearn.base import BaseEstimator, TransformerMixin
except ImportError:  # without scikit-learn it embeds all the same

    class BaseEstimator:  # type: ignore[no-redef]
        """Stands for scikit-learn's."""

    class TransformerMixin:  # type: ignore[no-redef]
        """Stands for scikit-learn's."""

        def fit_transform(self, X: Any, y: Any = None) -> Any:
            """Embed images; nothing is fitted."""
            return self.fit(X, y).transform(X)  # type: ignore[attr-defined]


AHEAD = 2  # batches that are read while the encoder computes


class Embedder(TransformerMixin, BaseEstimator):
    """Images to embeddings by a trained encoder, for `sklearn.pipeline.Pipeline` and other people's code.

    Examples:
        >>> classifier = make_pipeline(psm.Embedder("runs/a"), LogisticRegression())  # doctest: +SKIP
        >>> classifier.fit(["cat/1.jpg", "dog/1.jpg"], ["cat", "dog"])  # doctest: +SKIP

    An image is a path, a PIL image, a tensor (C, H, W) or (H, W), or an array (H, W), (H, W, C) or (C, H, W), uint8 or
    float in [0, 1]. Nothing is fitted: the encoder is loaded when it is first used, in each process by its path.
    """

    def __init__(
        self,
        checkpoint: str | Path,
        *,
        normalize: bool = False,
        batch_size: int = 256,
        accelerator: str = "auto",
        precision: str = "32-true",
        encoder: nn.Module | None = None,
    ):
        """Choose an encoder.

        Args:
            checkpoint: run folder, checkpoint (.ckpt) or encoder (.safetensors).
            normalize: scale each embedding to length 1.
            batch_size: images a forward pass.
            accelerator: auto, cpu, gpu or mps.
            precision: 32-true, bf16-mixed or 16-mixed.
            encoder: receives the weights of a run that was given a module as its encoder.
        """
        self.checkpoint = checkpoint
        self.normalize = normalize
        self.batch_size = batch_size
        self.accelerator = accelerator
        self.precision = precision
        self.encoder = encoder

    def fit(self, X: Any = None, y: Any = None) -> "Embedder":
        """Load the encoder. Images and labels are not looked at."""
        self._open()
        return self

    def transform(self, X: Any) -> np.ndarray:
        """Embeddings of images, float32 (N, D).

        Args:
            X: a sequence of N images, an array of N paths, or an array or tensor of four dimensions.
        """
        images = several(X)
        if images is None:
            raise UserError("one image is given where several are expected: put it into a list.")
        loaded, size = self._open(), self._open().info.size
        batches = (images[start : start + self.batch_size] for start in range(0, len(images), self.batch_size))
        embeddings = [np.empty((0, loaded.info.width), dtype=np.float32)]
        with ThreadPoolExecutor(num_cores()) as pool, quiet_pillow():

            def read(some: Sequence[Any]) -> np.ndarray:
                return np.stack(list(pool.map(lambda image: square_pixels(image, size), some)))

            for _, pixels in read_ahead(read, batches, AHEAD):
                found = loaded.embed(torch.from_numpy(pixels), self.batch_size)
                embeddings.append((normalize(found, dim=1) if self.normalize else found).numpy())
        return np.concatenate(embeddings)

    def get_feature_names_out(self, input_features: Any = None) -> np.ndarray:
        """Names of the columns: embedding0, embedding1, ..."""
        return np.array([f"embedding{i}" for i in range(self._open().info.width)], dtype=object)

    def _open(self) -> LoadedEncoder:
        """The encoder, loaded anew where a parameter has changed."""
        wanted = (str(self.checkpoint), id(self.encoder), self.accelerator, self.precision)
        if self.__dict__.get("_opened_as") != wanted:
            self._loaded = open_encoder(self.checkpoint, self.encoder, self.accelerator, self.precision)
            self._opened_as = wanted
        return self._loaded

    def __getstate__(self) -> dict[str, Any]:
        """Parameters alone: another process loads the encoder by its path."""
        inherited = getattr(super(), "__getstate__", lambda: self.__dict__)()
        return {name: value for name, value in inherited.items() if name not in ("_loaded", "_opened_as")}

    def __sklearn_is_fitted__(self) -> bool:
        return True

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.requires_fit = False
        tags.input_tags.two_d_array = False
        tags.input_tags.string = True
        tags.no_validation = True
        return tags
