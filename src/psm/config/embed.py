"""Settings of `psm embed`."""

from dataclasses import dataclass

from psm.config.keys import key
from psm.config.schema import ImagesConfig


@dataclass
class EveryImageConfig(ImagesConfig[None]):
    """Where images come from. Every image is read, whatever its split; labels are carried along where there are any."""

    size: int | None = key(None, "side in pixels at which images are decoded; none: the encoder's", at_least=8)
    limit: int | None = key(None, "only so many images, drawn evenly over classes where labels exist", at_least=2)
    max_unreadable: float = key(
        1.0, "refuse data when more than this share of its files cannot be read", at_least=0, at_most=1
    )


@dataclass
class EmbedConfig:
    """psm embed: the embedding of every image of a data set, in a file with one row an image."""

    checkpoint: str = key("", "run folder, checkpoint (.ckpt) or encoder (.safetensors) (needed)")
    data: str | list[str] | None = key(None, "as in pretrain; none: the data that the encoder was trained on")
    out: str = key("", "file to write, .parquet, .npy, .npz, .csv, .pt or .safetensors (needed)")
    overwrite: bool = key(False, "replace the file that out names, and work on it that was begun otherwise")
    normalize: bool = key(False, "scale each embedding to length 1")
    dtype: str = key("float32", "of the embeddings", choices=("float32", "float16"))
    batch_size: int = key(256, "images a forward pass", at_least=1)
    accelerator: str = key("auto", "where to compute", choices=("auto", "cpu", "gpu", "cuda", "mps"))
    precision: str = key("32-true", "of the forward pass", choices=("32-true", "bf16-mixed", "16-mixed"))
    progress: bool = key(True, "show progress with rate and time left")
    images: EveryImageConfig = key(EveryImageConfig, "")
