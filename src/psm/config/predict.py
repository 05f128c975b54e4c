"""The settings of `psm predict`. Imports nothing heavy."""

from dataclasses import dataclass

from psm.config.embed import EveryImageConfig
from psm.config.keys import key


@dataclass
class PredictConfig:
    """psm predict: the classes of images, the most probable first, with their probabilities."""

    checkpoint: str = key("", "run folder of `psm finetune` or its classifier.safetensors (needed)")
    data: str | list[str] = key("", "a folder of images, labeled or not, a set by name, or one image file (needed)")
    out: str = key("", "CSV file to write, one row an image (needed)")
    overwrite: bool = key(False, "replace the file that out names")
    top: int = key(5, "classes of each image, the most probable first (fewer where there are fewer)", at_least=1)
    batch_size: int = key(256, "images a forward pass", at_least=1)
    accelerator: str = key("auto", "where to compute", choices=("auto", "cpu", "gpu", "cuda", "mps"))
    precision: str = key("32-true", "of the forward pass", choices=("32-true", "bf16-mixed", "16-mixed"))
    progress: bool = key(True, "show progress with rate and time left")
    images: EveryImageConfig = key(EveryImageConfig, "")
