"""How many planted near-duplicates `psm explore` finds, and how many of the pairs that it finds are planted.

    python benchmarks/duplicates.py RUN FOLDER [--images 4000] [--copies 200] [--seed 1]

Images are drawn from the folder by the seed. To each of four times ``--copies`` of them a copy is added: encoded anew
as a JPEG of quality 50, resized to three quarters of its side, cropped by a tenth of its side at a random place, or
mirrored. The pairs found that were not planted are named: collections hold copies of their own.
"""

import argparse
import tempfile
from pathlib import Path

import numpy as np
from PIL import Image

import psm
from turns import keep

KINDS = ("encoded anew", "resized", "cropped", "mirrored")


def copy_of(image: Image.Image, kind: str, random: np.random.Generator) -> Image.Image:
    width, height = image.size
    if kind == "resized":
        return image.resize((width * 3 // 4, height * 3 // 4), Image.Resampling.BICUBIC)
    if kind == "cropped":
        across, down = round(0.1 * width), round(0.1 * height)
        left, top = int(random.integers(0, across + 1)), int(random.integers(0, down + 1))
        return image.crop((left, top, left + width - across, top + height - down))
    return image.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if kind == "mirrored" else image


def plant(folder: Path, out: Path, images: int, copies: int, seed: int) -> dict[str, str]:
    """Write originals and copies; returns the original and the kind of each copy, by its name."""
    random = np.random.default_rng(seed)
    files = sorted(path for path in folder.rglob("*") if path.suffix.lower() in (".jpeg", ".jpg", ".png"))
    chosen = random.choice(len(files), min(images, len(files)), replace=False)
    kinds = {}
    for number, index in enumerate(chosen.tolist()):
        (out / f"{number:06}{files[index].suffix}").write_bytes(files[index].read_bytes())
        if number < len(KINDS) * copies:
            kind = KINDS[number % len(KINDS)]
            with Image.open(files[index]) as image:
                copy = copy_of(image.convert("RGB"), kind, random)
            copy.save(out / f"{number:06}-copy.jpg", quality=50 if kind == "encoded anew" else 90)
            kinds[f"{number:06}"] = kind
    return kinds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--images", type=int, default=4000)
    parser.add_argument("--copies", type=int, default=200, help="of each kind")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        images = Path(place) / "images"
        images.mkdir()
        kinds = plant(options.folder, images, options.images, options.copies, options.seed)
        result = psm.explore(options.run, images, Path(place) / "out", map="pca")
    paths, found = result.index.paths, result.collection.duplicates
    pairs = [tuple(sorted((paths[a], paths[b]))) for a, b in found.pairs.tolist()]
    planted = [pair for pair in pairs if pair[0][:6] == pair[1][:6]]
    others = [pair for pair in pairs if pair[0][:6] != pair[1][:6]]
    recall = {
        kind: sum(kinds[pair[0][:6]] == kind for pair in planted) / sum(value == kind for value in kinds.values())
        for kind in KINDS
    }
    for kind, share in recall.items():
        print(f"{kind:14} {100 * share:6.2f} % found")
    print(f"all            {100 * len(planted) / len(kinds):6.2f} % found")
    print(
        f"planted, of the pairs found: {len(planted)} of {len(pairs)}, {100 * len(planted) / max(1, len(pairs)):.2f} %"
    )
    for pair in others:
        print("not planted:", *pair)
    count = {"images": len(paths), "copies": len(kinds), "pairs found": len(pairs), "planted": len(planted)}
    keep(
        "duplicates", {**count, "seed": options.seed, "recall": recall, "precision": len(planted) / max(1, len(pairs))}
    )


if __name__ == "__main__":
    main()
