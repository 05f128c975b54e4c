"""What single pages take for granted beyond the world: files to be there before, and names that a fragment uses."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import normalize

from documentation import world
from documentation.blocks import ROOT, page_code

Names = dict[str, Any]


def plain(work: Path) -> Names:
    import psm

    return {"psm": psm, "__name__": "page"}


def readme(work: Path) -> Names:
    world.shard_files(work / "shards")
    query, key, projection, query_view_key = normalize(torch.randn(4, 32, 128), dim=2)
    vectors = {"query": query.requires_grad_(), "key": key, "projection": projection, "query_view_key": query_view_key}
    return plain(work) | vectors | {"ids": torch.arange(32)}


def data(work: Path) -> Names:
    world.shard_files(work.parent / "sets" / "shards", prefix="train-")
    return plain(work)


def embed(work: Path) -> Names:
    import faiss
    import numpy
    import polars

    import psm

    psm.embed("runs/a", str(work / "photos"), "features.npy")
    files = sorted((work / "photos").rglob("*.jpg"))
    known = {"paths": [str(path) for path in files], "labels": [path.parent.name for path in files]}
    return plain(work) | known | {"faiss": faiss, "numpy": numpy, "polars": polars}


def large(work: Path) -> Names:
    """runs/a is a ResNet-18, which torchvision and timm have."""
    import safetensors.torch
    import torchvision

    shutil.rmtree(work / "runs" / "a")
    shutil.copytree(work / "runs" / "large", work / "runs" / "a")
    return plain(work) | {"torch": torch, "torchvision": torchvision, "safetensors": safetensors}


def export(work: Path) -> Names:
    code = page_code(ROOT / "docs" / "export.md")
    (work / "my_formats.py").write_text(next(one.text for one in code if "# my_formats.py" in one.text))
    return large(work)


def configuration(work: Path) -> Names:
    import torchvision

    torch.save(torchvision.models.resnet18().state_dict(), work / "resnet18.pth")
    return plain(work)


def extend(work: Path) -> Names:
    """The page's file, put together from its blocks; running these registers the same parts, so they are not run."""
    blocks = [one.text for one in page_code(ROOT / "docs" / "extend.md") if one.kind == "python"]
    (work / "my_parts.py").write_text("\n\n".join(blocks))
    return plain(work)


def experiments(work: Path) -> Names:
    from psm.experiments import catalog

    return plain(work) | vars(catalog)


def finetune(work: Path) -> Names:
    import psm

    return plain(work) | {"inputs": psm.load_encoder("runs/clf").preprocess(["photo.jpg"])}


def inspector(work: Path) -> Names:
    import psm

    return plain(work) | {"network": psm.load_encoder("runs/a")}


PRELUDES: dict[str, Callable[[Path], Names]] = {
    "README.md": readme,
    "docs/configuration.md": configuration,
    "docs/data.md": data,
    "docs/embed.md": embed,
    "docs/experiments.md": experiments,
    "docs/export.md": export,
    "docs/extend.md": extend,
    "docs/finetune.md": finetune,
    "docs/inspector.md": inspector,
    "docs/run-folder.md": large,
}
