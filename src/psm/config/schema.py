"""Every setting as a typed dataclass: its name, type, default and meaning in one place. Imports nothing heavy."""

from dataclasses import dataclass
from typing import Any, Generic, Never

from psm.config.evaluation import (
    SCORES,
    ClustersConfig,
    FewLabelsConfig,
    KnnConfig,
    LidarConfig,
    LinearConfig,
    LogisticConfig,
    RankMeConfig,
    RetrievalConfig,
)
from psm.config.keys import Unset, key
from psm.config.run_keys import RunKeys

# Groups of keys that describe a method; `psm.methods.MethodSpec` has the same.
METHOD_GROUPS = (
    *("positives", "negatives", "sampler", "weighting", "objective"),
    *("loss", "bank", "target", "predictor"),
)

# What is about one call and not about a run: never stored with it, never read from a file.
CALL_KEYS = ("out", "resume", "overwrite", "progress")

# What may differ when a run is resumed; anything else would make it another run.
MAY_CHANGE = {
    *CALL_KEYS,
    *("accelerator", "devices", "num_nodes", "strategy", "ddp", "loggers", "plugins", "callbacks"),
    *("images.root", "images.download", "images.memory", "images.cache", "images.max_unreadable"),
    *("images.shard_cache", "images.workers"),
}

# Keys of `psm experiment run` about the machines that runs work on, which change no result.
MACHINE_KEYS = ("jobs", "cpus", "gpus", "cluster", "slurm")


@dataclass
class ImagesConfig(Generic[Unset]):
    """Where images come from and how they are held. Labels serve evaluation and diagnostics only."""

    root: str = key("data", "folder that holds the published sets (cifar10, cifar100, tiny-imagenet) or receives them")
    download: bool = key(True, "download a published set that is not there")
    size: int | Unset = key(None, "side in pixels at which images are held; none: the set's own", at_least=8)
    max_size: int | None = key(
        None, "where size is none: hold images at most at this side in pixels, smaller ones at their own", at_least=8
    )
    limit: int | None = key(
        None, "use only so many training images, drawn evenly over classes where labels exist", at_least=2
    )
    split: str = key(
        "paper",
        "tiny-imagenet: paper (90 % / 10 % of the labeled images) or official (train / val)",
        choices=("paper", "official"),
    )
    labels: str = key(
        "auto",
        "folders: auto, subfolder (the first level below the split names the class) or none",
        choices=("auto", "subfolder", "none"),
    )
    test_share: float = key(
        0.1, "labeled folders without a test, val or valid folder: share of each class held out", above=0, below=1
    )
    holdout: float | None = key(
        None,
        "for choosing settings: hold out this share of each class of the training images and test on it instead of on "
        "the test images",
        above=0,
        below=1,
    )
    max_unreadable: float = key(
        0.1, "refuse a folder when more than this share of its files cannot be read", at_least=0, at_most=1
    )
    memory: float = key(
        4.0, "hold sets up to so many GB in memory; larger ones go through a memory-mapped cache", above=0
    )
    cache: str | None = key(None, "folder of that cache; none: psm below the user's cache folder")
    whole: bool = key(
        False, "files: hold whole images, so that crops are taken from all of one, not from its center square"
    )
    whole_size: int | None = key(
        None, "whole: shorter side in pixels at which they are held; none: a quarter more than images.size", at_least=8
    )
    window: int | None = key(None, "shards: how many of them are mixed at a time; none: 8", at_least=1)
    shard_cache: float | None = key(None, "shards: GB of disk for copies of remote ones; none: 20", above=0)
    workers: int | None = key(
        None,
        "processes (shards) or threads (cache) that read ahead for a device; none: its share of the cores",
        at_least=0,
    )

    def side(self, own: int) -> int:
        """The side in pixels at which images are held whose own one is ``own``."""
        return self.size if isinstance(self.size, int) else min(own, self.max_size or own)


@dataclass
class ViewsConfig:
    """Random augmentations of the views of each image. None: as the preset says."""

    preset: str = key(
        "auto",
        "small (crops from 0.2 of the area, no blur), large (with blur), simclr (small with crops from 0.08) or auto: "
        "small below 64 pixels, large from there on",
        choices=("auto", "small", "large", "simclr"),
    )
    count: int = key(
        2,
        "views of each image in a batch; the loss is the mean over all ordered pairs of them",
        at_least=2,
        neutral=True,
    )
    size: int | None = key(None, "side of a view in pixels; none: that of the images", at_least=1)
    crop_scale: list[float] | None = key(
        None,
        "random resized crop: smallest and largest fraction of the area",
        above=0,
        at_most=1,
        length=2,
        ascending=True,
    )
    crop_ratio: list[float] | None = key(
        None, "random resized crop: smallest and largest aspect ratio", above=0, length=2, ascending=True
    )
    flip: float | None = key(None, "probability of a horizontal flip", at_least=0, at_most=1)
    color_jitter: float | None = key(None, "probability of color jitter", at_least=0, at_most=1)
    brightness: float | None = key(None, "color jitter: factor from 1 - this to 1 + this", at_least=0)
    contrast: float | None = key(None, "color jitter: factor from 1 - this to 1 + this", at_least=0)
    saturation: float | None = key(None, "color jitter: factor from 1 - this to 1 + this", at_least=0)
    hue: float | None = key(None, "color jitter: hue angle from - this to this, in turns", at_least=0, at_most=0.5)
    grayscale: float | None = key(None, "probability of dropping color", at_least=0, at_most=1)
    blur: float | None = key(None, "probability of a Gaussian blur", at_least=0, at_most=1)
    blur_sigma: list[float] | None = key(
        None, "blur: smallest and largest standard deviation, in pixels of the view", above=0, length=2, ascending=True
    )
    solarize: float | None = key(
        None, "probability of inverting the pixels brighter than the middle", at_least=0, at_most=1
    )


@dataclass
class HeadsConfig:
    """Projector and predictor: two layers each (encoder - hidden - out and out - hidden - out)."""

    hidden_dim: int = key(512, "width of the hidden layer", at_least=1)
    out_dim: int = key(128, "width of projections and predictions", at_least=2)
    layers: int = key(2, "linear layers of the projector", at_least=1, neutral=True)
    norm_last: str = key(
        "batch",
        "what a head ends in: batch norm, batch norm without scale and shift, or none: a linear layer with bias",
        choices=("batch", "batch-no-affine", "none"),
        neutral=True,
    )


@dataclass
class OptimConfig(Generic[Unset]):
    """The optimizer; its learning rate warms up, then falls by a cosine to zero, a pure function of the step."""

    name: str = key("sgd", "sgd, adamw or lars", choices=("sgd", "adamw", "lars"))
    lr: float | Unset = key(None, "learning rate after warm-up; none: sgd 0.1, adamw 1e-3, lars 1", at_least=0)
    warmup_lr: float = key(1e-4, "learning rate at the first step", at_least=0)
    warmup: float = key(0.1, "warm-up as a share of all steps (the paper: 20 of 200 epochs)", at_least=0, at_most=1)
    weight_decay: float | Unset = key(
        None,
        "weight decay; none: sgd 1e-3 below 64 pixels and 1e-4 from there on (the paper's), adamw 1e-2, lars 1e-6",
        at_least=0,
    )
    exclude_norm_bias: bool = key(False, "no weight decay on norms and biases (lars never decays them)")
    clip: float | None = key(None, "clip the norm of the gradient at this value", above=0)
    momentum: float = key(0.9, "sgd, lars: momentum", at_least=0, below=1)
    nesterov: bool = key(False, "sgd: Nesterov momentum")
    betas: list[float] = key(
        [0.9, 0.999], "adamw: decay rates of the running means of gradient and square", at_least=0, below=1, length=2
    )
    eps: float = key(1e-8, "adamw: added to the denominator", above=0)
    trust_coefficient: float = key(0.001, "lars: factor of the ratio between the norms of weights and update", above=0)


@dataclass
class MonitorConfig:
    """What is measured while training."""

    knn: bool = key(True, "score the encoder by nearest neighbors where labels exist")
    every: int = key(1, "do so every so many epochs, and after the last", at_least=1)
    images: int = key(5000, "training images that vote in it, at most", at_least=1)
    test_images: int = key(2000, "test images that are scored in it, at most", at_least=1)
    log_every: int = key(50, "send the loss to the loggers every so many steps", at_least=1)
    linear: bool = key(False, "train a linear classifier beside the encoder, on its features as they are; needs labels")
    purity: bool = key(False, "how often mined rows have the query's label (figure 1); needs labels and a bank")


@dataclass
class SaveConfig:
    """What is kept of a run."""

    every_steps: int | None = key(
        None, "write the checkpoint every so many steps too, not only after each epoch", at_least=1
    )
    every_epochs: int | None = key(
        None, "write the checkpoint only every so many epochs, and after the last; none: after each", at_least=1
    )
    snapshots: int | None = key(None, "keep a copy of the checkpoint every so many epochs", at_least=1)


@dataclass
class PretrainSubject:
    """What is trained on what, and for how long."""

    out: str = key("", "run folder to write (needed)")
    data: str | list[str] = key(
        "shapes", "a name (see `psm data`), a folder, a list of files, shards, hf:NAME, or several: [a,b]", filled=True
    )
    method: str = key("psm", "see `psm methods`")
    encoder: str = key("resnet18", "tiny, resnet18, resnet34, resnet50, torchvision/NAME or timm/NAME")
    stem: str = key(
        "auto",
        "cifar (3x3), imagenet (7x7 and pooling) or auto: cifar below 96 pixels",
        choices=("auto", "cifar", "imagenet"),
    )
    init: str | None = key(
        None,
        "weights to start from: a run folder, a checkpoint, a .safetensors, the name of a published encoder, or a "
        "state dict of torchvision or timm (.pth, .pt); a run brings its settings too, where none are given",
        filled=True,
    )
    init_heads: bool | None = key(
        None,
        "take projector and predictor of init too; none: where it has them and they fit, else they start at random",
    )
    preset: str = key(
        "auto",
        "scale of what is not given: laptop (for a CPU), paper (for a GPU; the defaults shown here) or auto: by the "
        "device",
        choices=("auto", "laptop", "paper"),
    )
    epochs: int = key(200, "how often the images are seen", at_least=1)
    batch_size: int = key(256, "images a step over all devices together", at_least=2)


@dataclass
class PretrainSettings(RunKeys, PretrainSubject, Generic[Unset]):  # keys of the last class are listed first
    """Every setting of pretraining, both as users give them and as a run has them."""

    grad_cache_chunk: int | None = key(
        None,
        "images that go through the networks at a time on a device, for batches too large for its memory",
        at_least=2,
        topic="machine",
    )
    compile: str | None = key(
        None,
        "compile networks, views and loss with this backend of torch.compile, for example inductor",
        topic="machine",
    )
    compile_mode: str | None = key(
        None, "mode of compile=inductor: default, reduce-overhead (CUDA graphs), max-autotune, ...", topic="machine"
    )
    plugins: list[str] = key(
        [], "Python files or modules that register parts and methods, [my_parts.py]", topic="extras"
    )
    images: ImagesConfig[Unset] = key(ImagesConfig, "")
    views: ViewsConfig = key(ViewsConfig, "")
    heads: HeadsConfig = key(HeadsConfig, "")
    positives: dict[str, Any] = key(
        dict, "what a query is pulled to: positives.rule=view, nn or knn", open="rule", topic="parts"
    )
    negatives: dict[str, Any] = key(
        dict, "what a query is pushed from: negatives.source=views, positives, bank, ...", open="source", topic="parts"
    )
    sampler: dict[str, Any] = key(
        dict, "which negatives are kept: sampler.name=pnsm or none", open="name", topic="parts"
    )
    weighting: dict[str, Any] = key(
        dict, "what negatives weigh: weighting.name=sum, debiased, hard or bayesian", open="name", topic="parts"
    )
    objective: dict[str, Any] = key(
        dict, "objective.name=contrastive, decoupled, byol or vicreg", open="name", topic="parts"
    )
    loss: dict[str, Any] = key(
        dict, "temperature, soft_weight, hard_weight (lambda), symmetric, reduction, ...", topic="parts"
    )
    bank: dict[str, Any] = key(dict, "the memory bank: size, index, allow_self", topic="parts")
    target: dict[str, Any] = key(dict, "the target network: enabled, momentum (EMA), schedule, views", topic="parts")
    predictor: dict[str, Any] = key(dict, "the predictor: enabled, hidden_dim, lr_factor", topic="parts")
    optim: OptimConfig[Unset] = key(OptimConfig, "")
    monitor: MonitorConfig = key(MonitorConfig, "")
    save: SaveConfig = key(SaveConfig, "")


@dataclass
class PretrainConfig(PretrainSettings[None]):
    """psm pretrain: learn an encoder from unlabeled images."""


@dataclass
class ResolvedPretrainConfig(PretrainSettings[Never]):
    """psm pretrain: the settings of a run, with what the method and the data decide filled in."""


@dataclass
class EvaluateConfig:
    """psm evaluate: score a frozen encoder."""

    plugins: list[str] = key([], "Python files or modules that register parts and methods, [my_parts.py]")
    checkpoint: str = key("", "run folder, checkpoint (.ckpt) or encoder (.safetensors) (needed)")
    data: str | list[str] | None = key(None, "as in pretrain; none: the data that the encoder was trained on")
    out: str | None = key(None, "folder for scores.jsonl; none: the run folder, or the folder of the file")
    scores: list[str] | None = key(
        None,
        "which scores, for example [knn,logistic], or all; none: those whose enabled is true, kNN and the paper's "
        "linear protocol",
        filled=True,
        choices=("all", *SCORES),
    )
    baselines: bool = key(False, "also score raw pixels and an untrained encoder")
    batch_size: int = key(512, "images a forward pass", at_least=1)
    seed: int = key(0, "decides every random draw: the linear layer's start and order, draws of labels, views")
    accelerator: str = key("auto", "Lightning's: auto, cpu, gpu, mps")
    precision: str = key(
        "32-true", "32-true, bf16-mixed or 16-mixed, for the features", choices=("32-true", "bf16-mixed", "16-mixed")
    )
    progress: bool = key(True, "show progress bars")
    images: ImagesConfig[None] = key(ImagesConfig, "")
    knn: KnnConfig = key(KnnConfig, "")
    linear: LinearConfig = key(LinearConfig, "")
    logistic: LogisticConfig = key(LogisticConfig, "")
    few_labels: FewLabelsConfig = key(FewLabelsConfig, "")
    retrieval: RetrievalConfig = key(RetrievalConfig, "")
    clusters: ClustersConfig = key(ClustersConfig, "")
    rankme: RankMeConfig = key(RankMeConfig, "")
    lidar: LidarConfig = key(LidarConfig, "")


@dataclass
class InspectConfig:
    """psm inspect: a page that shows what a run mined, query by query and epoch by epoch."""

    plugins: list[str] = key([], "Python files or modules that register parts and methods, [my_parts.py]")
    run: str = key("", "run folder to look into (needed; may stand alone: psm inspect runs/a)")
    data: str | list[str] | None = key(
        None, "where the run's images are now, if they have moved; none: where they were"
    )
    out: str | None = key(None, "page to write; none: inspect.html in the run folder, replaced if it is there")
    overwrite: bool = key(False, "replace the page that out names")
    queries: int = key(300, "images to mine for, drawn evenly over classes where labels exist", at_least=1)
    negatives: int = key(
        48, "negatives shown of a query: half of them its hardest, half spread over the others", at_least=1
    )
    others: int = key(512, "images that stand for the rest of a batch, where negatives come from the batch", at_least=2)
    seed: int = key(0, "decides which images are queries and which the others")
    progress: bool = key(True, "show a progress bar")
    images: ImagesConfig[None] = key(ImagesConfig, "")


@dataclass
class DataConfig:
    """psm data: what a data set holds; without data= the list of published sets."""

    data: str | list[str] | None = key(None, "as in pretrain")
    sheet: str | None = key(None, "write a contact sheet of some images to this PNG file")
    shards: str | None = key(None, "write the images as shards (tar files), for example out/%06d.tar")
    shard_mb: float = key(256.0, "shards: size in MB at which a new one is begun", above=0)
    images: ImagesConfig[None] = key(ImagesConfig, "")


@dataclass
class MethodsConfig:
    """psm methods: the table of methods; with method= one of them with its settings and reference."""

    plugins: list[str] = key([], "Python files or modules that register parts and methods, [my_parts.py]")
    method: str | None = key(None, "the method to describe")


@dataclass
class ExperimentConfig:
    """psm experiment: the paper's tables and figures; `list` them, `run NAME...` some or all, `report` the results."""

    plugins: list[str] = key([], "Python files or modules that register parts and methods, [my_parts.py]")
    out: str = key("study", "folder of the study: run folders, results, pages", filled=True)
    preset: str = key(
        "laptop", "scale of every run: paper (GPU), overnight, tuned, laptop or smoke; see `psm experiment list`"
    )
    tuned: str | None = key(
        None,
        "YAML file with settings for each data set and method, as `settle` writes it; none: with preset=tuned those "
        "that come with psm",
    )
    data: list[str] | None = key(
        None, "sets to run on, [cifar10,cifar100] or a folder; none: as the preset says", filled=True
    )
    seeds: list[int] | None = key(
        None, "run everything with each of these seeds; none: as the preset says", filled=True
    )
    methods: list[str] | None = key(
        None, "only rows of these methods, for example [psm,simclr]; none: all rows", filled=True
    )
    rows: list[str] | None = key(
        None, "only rows of these titles, for example ['HCL','PSM v2, 4 views']; none: all rows", filled=True
    )
    jobs: int | None = key(
        None,
        "runs at a time; none: as many as cpus= and gpus= leave room for, on this machine without either 1",
        at_least=1,
    )
    cpus: int | None = key(None, "cores of a run, and its threads; none: divided among the runs", at_least=1)
    gpus: float | None = key(
        None,
        "GPUs of a run, 0.5 for two runs on one; none: one for each of its devices where there are any",
        at_least=0,
    )
    cluster: str | None = key(
        None,
        "where runs work: none for this machine, auto or ADDRESS for a Ray cluster, slurm for jobs of SLURM, submitit "
        "for those of what submitit finds",
        filled=True,
    )
    slurm: dict[str, Any] = key(
        dict, "options of SLURM's jobs, for example slurm.partition=gpu slurm.time=720 (minutes)"
    )
    progress: bool = key(True, "show a display with the time left; false: a line when a run starts and ends")
    knn: KnnConfig = key(KnnConfig, "")
    linear: LinearConfig = key(LinearConfig, "")
