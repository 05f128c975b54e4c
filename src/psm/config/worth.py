"""The settings of `psm worth`. Imports nothing heavy."""

from dataclasses import dataclass

from psm.config.finetune import FinetuneViewsConfig
from psm.config.keys import key
from psm.config.schema import ImagesConfig

ARMS = ("scratch", "knn", "logistic", "finetune")


@dataclass
class ScratchConfig:
    """The classifier from scratch: the same network with random weights, trained on the labeled images alone."""

    epochs: int = key(30, "how often the labeled images are seen", at_least=1)
    lr: float = key(0.1, "learning rate of SGD after warm-up", at_least=0)
    weight_decay: float = key(5e-4, "weight decay", at_least=0)


@dataclass
class TunedConfig:
    """The fine-tuned classifier: the pretrained encoder, trained further on the labeled images."""

    epochs: int = key(30, "how often the labeled images are seen", at_least=1)
    lr: float = key(0.03, "learning rate of SGD after warm-up", at_least=0)
    weight_decay: float = key(5e-4, "weight decay", at_least=0)
    layer_decay: float = key(1.0, "factor of the learning rate from each layer to the one below it", above=0, at_most=1)


@dataclass
class WorthConfig:
    """psm worth: was pretraining worth it? A classifier from scratch, on frozen features and fine-tuned, by labels."""

    checkpoint: str = key("", "run folder, checkpoint (.ckpt) or encoder (.safetensors) (needed)")
    data: str | list[str] | None = key(
        None, "labeled images, as in pretrain; none: the data that the encoder was trained on"
    )
    out: str | None = key(None, "folder for page and results; none: worth in the run folder, or beside the file")
    labels: list[str] = key(
        ["1%", "10%", "100%"],
        "amounts of labels: shares of each class, 10%, or images of each class, 5, written [1%,10%]",
        filled=True,
    )
    draws: int = key(3, "how often the labeled images are drawn anew, and the networks with another seed", at_least=1)
    arms: list[str] = key(
        list(ARMS),
        "which classifiers: scratch, and of the encoder knn, logistic and finetune",
        choices=ARMS,
        filled=True,
    )
    steps: int = key(300, "steps that a network is trained for at least: few labels are seen more often", at_least=1)
    batch_size: int = key(64, "images a step", at_least=2)
    label_smoothing: float = key(0.1, "share of the target that is spread evenly over all classes", at_least=0, below=1)
    k: int = key(20, "kNN: neighbors that vote (fewer where there are fewer labels)", at_least=1)
    temperature: float = key(0.1, "kNN: a vote weighs exp(cosine similarity / temperature)", above=0)
    seed: int = key(0, "decides every draw and every network's start")
    overwrite: bool = key(False, "move the results in out aside, to out.replaced-1, and start anew")
    accelerator: str = key("auto", "Lightning's: auto, cpu, gpu, mps")
    precision: str = key("32-true", "Lightning's: 32-true, bf16-mixed, 16-mixed, ...")
    progress: bool = key(True, "show progress")
    images: ImagesConfig[None] = key(ImagesConfig, "")
    views: FinetuneViewsConfig = key(FinetuneViewsConfig, "")
    scratch: ScratchConfig = key(ScratchConfig, "")
    finetune: TunedConfig = key(TunedConfig, "")
