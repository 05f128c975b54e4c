"""Settings of `psm search`."""

from dataclasses import dataclass

from psm.config.keys import key


@dataclass
class SearchConfig:
    """psm search: the images of a file of embeddings that are most like a query image."""

    features: str = key("", "file that `psm embed` wrote (needed; may stand alone: psm search features.parquet)")
    query: list[str] = key([], "image file, folder of images or path of an image of the file; several as [a.jpg,b.jpg]")
    row: int | list[int] | None = key(None, "row of the file as the query, from 0; several as [17,20]", at_least=0)
    k: int = key(20, "images to find for each query", at_least=1)
    index: str = key(
        "exact", "exact, or faiss: inverted lists, for many millions of images", choices=("exact", "faiss")
    )
    probes: int = key(32, "faiss: lists looked into; more of them find more and take longer", at_least=1)
    checkpoint: str | None = key(None, "the encoder that made the embeddings, if it has moved; none: where it was")
    data: str | list[str] | None = key(None, "where the images are now, if they have moved; none: where they were")
    out: str | None = key(None, "page to write; none: FEATURES.search.html, replaced if it is there")
    overwrite: bool = key(False, "replace the page that out names")
    page: bool = key(True, "write a page with thumbnails")
    accelerator: str = key("auto", "where queries are embedded", choices=("auto", "cpu", "gpu", "cuda", "mps"))
