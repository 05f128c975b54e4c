"""Settings of `psm explore`."""

from dataclasses import dataclass

from psm.config.embed import EveryImageConfig
from psm.config.keys import key


@dataclass
class ExploreConfig:
    """psm explore: a page to look at a collection: map, clusters, near-duplicates, outliers, neighbors and labels."""

    checkpoint: str = key("", "run folder, checkpoint (.ckpt) or encoder (.safetensors) (needed)")
    data: str | list[str] | None = key(None, "as in pretrain; none: the data that the encoder was trained on")
    out: str | None = key(None, "folder to write; none: explore in the run folder, replaced if it is there")
    overwrite: bool = key(False, "replace the files of an earlier call in the folder that out names")
    shown: int = key(10_000, "images on the page at most; the CSV files have all of them", at_least=2)
    map: str = key("auto", "auto: umap where it is installed, else pca", choices=("auto", "umap", "pca"))
    clusters: int = key(20, "clusters at most; fewer where there are fewer than 20 images for each", at_least=2)
    neighbors: int = key(20, "neighbors of an image that are looked at", at_least=2)
    outliers: float = key(0.01, "share of the images that is listed as outliers", at_least=0, at_most=1)
    match: float = key(
        0.7, "near-duplicates: least correlation of the details of two images, aligned", above=0, at_most=1
    )
    index: str = key("exact", "exact, or faiss for hundreds of thousands of images", choices=("exact", "faiss"))
    seed: int = key(0, "decides clusters, map and which images are shown")
    batch_size: int = key(256, "images a forward pass", at_least=1)
    accelerator: str = key("auto", "where to compute", choices=("auto", "cpu", "gpu", "cuda", "mps"))
    precision: str = key("32-true", "of the forward pass", choices=("32-true", "bf16-mixed", "16-mixed"))
    progress: bool = key(True, "show progress with rate and time left")
    images: EveryImageConfig = key(EveryImageConfig, "")
