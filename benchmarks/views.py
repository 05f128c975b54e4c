"""Times psm's views beside kornia's and lightly's on the same work: two views of 256 images by SimCLR's recipe.

    benchmarks/make-peers PEERS
    python benchmarks/views.py --peers PEERS

All are timed in one process of the peers' environment, in turns, so that a busy machine slows each alike; a ratio is
taken within a turn. psm and kornia work on the batch, lightly on one PIL image at a time, once in this process and
once in as many worker processes as there are threads. Times include draws and normalization for all, decoding for none.
On a machine that others use at the same time, threads that wait for each other drown all else: use --threads 1 there.
"""

import argparse
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

from turns import in_turns, keep, shown, spread, timed

REPOSITORY = Path(__file__).resolve().parent.parent
MEAN, STD = (0.49, 0.48, 0.45), (0.25, 0.24, 0.26)
BATCH, VIEWS = 256, 2


def main() -> None:
    """Hand over to the peers' Python, which has what psm's views need and the libraries beside it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--peers", type=Path, required=True, help="environment made by benchmarks/make-peers")
    parser.add_argument("--repeats", type=int, default=9, help="turns that are counted, after one that is not")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="threads, and lightly's worker processes")
    parser.add_argument("--sizes", type=int, nargs="+", default=[32, 64], help="sides of the images and views")
    arguments = parser.parse_args()
    if Path(sys.prefix).resolve() == arguments.peers.resolve():
        compare(arguments)
        return
    python = arguments.peers / "bin" / "python"
    if not python.exists():
        parser.error(f"{arguments.peers} holds no environment; make it with benchmarks/make-peers {arguments.peers}")
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY / "src"), "OMP_NUM_THREADS": str(arguments.threads)}
    sys.exit(subprocess.run([python, "-W", "ignore", *sys.argv], env=environment).returncode)


def compare(arguments: argparse.Namespace) -> None:
    """Time every contender in turns, for each size without and with blur, and print a table."""
    import torch

    torch.set_num_threads(arguments.threads)
    work = f"{VIEWS} views of {BATCH} images, {arguments.threads} threads, {arguments.repeats} turns"
    print(f"{work}, torch {torch.__version__}")
    print(f"{'work':<16}{'contender':<22}{'ms a view':>10}{'times as slow as psm: median (least - most)':>46}")
    rows = []
    for size in arguments.sizes:
        for blur in (0.0, 0.5):
            images = torch.randint(0, 256, (BATCH, 3, size, size), dtype=torch.uint8)
            workers = {"lightly": 0, f"lightly, {arguments.threads} workers": arguments.threads}
            contenders = {"psm": psm_views(images, blur), "kornia": kornia_views(images, blur)}
            contenders |= {name: lightly_views(images, blur, count) for name, count in workers.items()}
            seconds = in_turns({name: lambda w=work: timed(w) for name, work in contenders.items()}, arguments.repeats)
            row = {"pixels": size, "blur": blur, "ms a view": {}, "times as slow as psm": {}}
            for name, times in seconds.items():
                ratios = spread([time / own for time, own in zip(times, seconds["psm"], strict=True)])
                row["ms a view"][name] = milliseconds = 1e3 * spread(times)["median"] / (BATCH * VIEWS)
                row["times as slow as psm"][name] = ratios
                print(f"{size} px, blur {blur:<4}{name:<22}{milliseconds:>10.4f}{shown(ratios, 1):>46}", flush=True)
            rows.append(row)
    keep("views", rows)


def psm_views(images, blur: float) -> Callable[[], None]:
    """This project's."""
    import torch

    from psm.config.schema import ViewsConfig
    from psm.views.transform import Views

    views = Views(ViewsConfig(blur=blur), images.shape[-1], MEAN, STD)
    generator = torch.Generator().manual_seed(0)
    return lambda: views.apply(images, views.sample_params(len(images), generator, VIEWS))


def kornia_views(images, blur: float) -> Callable[[], None]:
    """kornia's batched augmentations, both views in one batch, each image with its own draws."""
    import kornia.augmentation as augmentation
    import torch

    size = images.shape[-1]
    steps = [
        # Its other mode cuts images out one by one and takes as long.
        augmentation.RandomResizedCrop((size, size), scale=(0.2, 1.0), align_corners=False, cropping_mode="resample"),
        augmentation.RandomHorizontalFlip(p=0.5),
        augmentation.ColorJitter(0.4, 0.4, 0.4, 0.1, p=0.8),
        augmentation.RandomGrayscale(p=0.2),
        augmentation.Normalize(torch.tensor(MEAN), torch.tensor(STD)),
    ]
    if blur > 0:
        side = size // 10 + (size // 10 + 1) % 2  # a tenth of the image, made odd
        steps.insert(4, augmentation.RandomGaussianBlur((side, side), (0.1, 2.0), p=blur))
    recipe = torch.nn.Sequential(*steps)

    @torch.no_grad()
    def work() -> None:
        recipe(images.repeat(VIEWS, 1, 1, 1).float().div_(255))

    return work


class PilImages:
    """Images as PIL images, both views on access: what lightly's users hand to a data loader."""

    def __init__(self, images, transform: Callable):
        from PIL import Image

        self.images = [Image.fromarray(image.permute(1, 2, 0).numpy()) for image in images]
        self.transform = transform

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int):
        return self.transform(self.images[index])


def lightly_views(images, blur: float, workers: int) -> Callable[[], None]:
    """lightly's SimCLR transform with the strengths and the crop of the recipe, through a data loader."""
    warnings.simplefilter("ignore")
    from lightly.transforms import SimCLRTransform
    from torch.utils.data import DataLoader

    transform = SimCLRTransform(
        input_size=images.shape[-1],
        cj_strength=0.5,
        min_scale=0.2,
        gaussian_blur=blur,
        normalize={"mean": list(MEAN), "std": list(STD)},
    )
    # A worker makes whole batches, so the batch is divided among them.
    share = len(images) // max(workers, 1)
    loader = DataLoader(
        PilImages(images, transform), batch_size=share, num_workers=workers, persistent_workers=workers > 0
    )

    def work() -> None:
        for _ in loader:
            pass

    return work


if __name__ == "__main__":
    main()
