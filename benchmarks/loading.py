"""Times the ways to read images: decoded and cropped to 224 pixels, beside torchvision, webdataset and datasets.

    python benchmarks/loading.py IMAGES [--count 3000] [--files 100000]

IMAGES is a folder of real images; copies of them, enlarged to 320 - 500 pixels, are what is read. All read the same
JPEG files by two workers, in turns within one run, and make one random crop of 224 pixels an image: psm from shards
(with simplejpeg and with Pillow), from whole images in its cache and from squares in its cache; torchvision's
ImageFolder, webdataset's own loader and Hugging Face datasets with torchvision's RandomResizedCrop in a torch
DataLoader. CPU time is that of all processes: it depends less on who else uses the machine. Then: the start with many
files, and memory and disk while shards of ten times the allowed cache are read from a local server.
"""

import argparse
import contextlib
import functools
import http.server
import io
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from psm.config.schema import ImagesConfig, ViewsConfig
from psm.data import decode, load_dataset
from psm.data.loader import BatchLoader
from psm.data.shard_writer import write_shards
from psm.data.stream_loader import StreamLoader
from psm.models.torchvision_ops import define_missing_operators
from psm.utils.seeding import generator
from psm.views.transform import Views
from turns import in_turns, keep, kept_before, shown, spread

SIZE, BATCH, WORKERS = 224, 64, 2
SHARDS = 160  # about so many for the measurement of memory, ten images or more in each
NOISE = 18.0  # standard deviation of the noise: files of half a byte a pixel, as those of ImageNet


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("images", type=Path, help="folder of real images, of any size")
    parser.add_argument("--count", type=int, default=3000, help="enlarged images to make of them")
    parser.add_argument("--turns", type=int, default=5, help="turns that are counted, after one that is not")
    parser.add_argument("--files", type=int, default=100_000, help="files of the start")
    parser.add_argument("--scratch", type=Path, help="folder for the files that are made, on a disk; default: TMPDIR")
    parser.add_argument("--only", choices=("rates", "start", "memory"), help="one part of it")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    parts: dict[str, Callable[[Path], list[dict]]] = {
        "rates": lambda folder: rates(folder, arguments),
        "start": lambda folder: start(folder, arguments.files),
        "memory": lambda folder: memory(folder, arguments),
    }
    found = kept_before("loading") or {}
    for name, part in parts.items():
        if arguments.only in (None, name):
            with tempfile.TemporaryDirectory(dir=arguments.scratch) as temporary:
                found = {**found, name: part(Path(temporary))}
                keep("loading", found)


def make_images(source: Path, folder: Path, count: int) -> Path:
    """Real images enlarged to 320 - 500 pixels, as heavy as photographs: quality 90, noise of a camera at night.

    Without the noise an enlarged image has a third of a photograph's bytes and is decoded faster.
    """
    random = np.random.default_rng(0)
    files = sorted(file for file in source.rglob("*") if file.suffix.lower() in (".jpeg", ".jpg", ".png"))
    for number in range(count):
        longer = int(random.integers(320, 501))
        sides = (longer, round(longer * random.uniform(2 / 3, 1)))
        with Image.open(files[number * len(files) // count]) as image:
            pixels = np.asarray(image.convert("RGB").resize(sides[:: random.choice([1, -1])], 3), float)
        pixels = pixels + random.normal(0, NOISE, pixels.shape)
        path = folder / f"class{number * 10 // count}" / f"{number:06}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8)).save(path, quality=90)
    return folder


def draws(views: Views, batch_size: int) -> Callable:
    """One crop of each image of a batch."""
    return lambda step: views.sample_params(batch_size, generator(0, "views", step), views=1).crop_draws(
        views.settings.crop_ratio
    )


def psm_crops(images: object, batch_size: int = BATCH, workers: int = WORKERS) -> int:
    """Crop every image once; returns how many."""
    views = Views(ViewsConfig(size=SIZE, crop_scale=[0.08, 1.0]), SIZE, (0.5,) * 3, (0.2,) * 3)
    loader = StreamLoader(images, batch_size, 0, draws(views, batch_size), SIZE, workers=workers)
    return sum(batch.ids.numel() for batch in loader)


def without_simplejpeg(work: Callable[[], int]) -> int:
    """What a user has who installed psm without the extra for JPEG files."""
    module, decode.simplejpeg = decode.simplejpeg, None
    try:
        return work()
    finally:
        decode.simplejpeg = module


def psm_squares(images: object) -> int:
    """Read squares and let the views crop them, with colors and normalization: what a training step does."""
    settings = ViewsConfig(size=SIZE, crop_scale=[0.08, 1.0], preset="small")
    views = Views(settings, images.shape[-1], (0.5,) * 3, (0.2,) * 3)
    torch.set_num_threads(WORKERS)
    count = 0
    for batch in BatchLoader(images, BATCH, 0, workers=WORKERS):
        views.apply(batch.images, views.sample_params(BATCH, generator(0, "views", batch.step), views=1))
        count += len(batch.ids)
    torch.set_num_threads(1)
    return count


def through(dataset: object) -> int:
    """All of a dataset by torch's DataLoader; returns how many images."""
    options = {"batch_size": BATCH, "num_workers": WORKERS, "drop_last": True}
    shuffled = {} if isinstance(dataset, torch.utils.data.IterableDataset) else {"shuffle": True}
    count = 0
    for batch in torch.utils.data.DataLoader(dataset, **options, **shuffled):
        images = batch["image"] if isinstance(batch, dict) else batch[0]
        assert images.shape[1:] == (3, SIZE, SIZE)
        count += len(images)
    return count


def contenders(folder: Path, root: Path) -> dict[str, Callable[[], int]]:
    """Each reads the whole set once and returns how many images it gave."""
    cache = str(folder / "cache")
    everything = {"cache": cache, "size": SIZE, "labels": "none"}
    pattern = str(folder / "shards" / "%06d.tar")
    tenth = sum(file.stat().st_size for file in root.rglob("*.*")) / 10
    shards = write_shards(str(root), pattern, ImagesConfig(cache=cache), tenth, progress=False).files
    streamed = load_dataset(str(folder / "shards"), ImagesConfig(**everything), progress=False).train
    whole = load_dataset(str(root), ImagesConfig(**everything, whole=True), progress=False).train
    squares = load_dataset(str(root), ImagesConfig(**everything | {"size": 256}, memory=1e-9), progress=False).train

    def into_cache() -> int:
        shutil.rmtree(folder / "fresh", ignore_errors=True)
        config = ImagesConfig(**everything | {"cache": str(folder / "fresh")}, whole=True)
        return len(load_dataset(str(root), config, progress=False).train)

    found = {
        "psm: JPEG files into the cache": into_cache,
        "psm: shards": lambda: psm_crops(streamed.streamed),
        "psm: shards, Pillow alone": lambda: without_simplejpeg(lambda: psm_crops(streamed.streamed)),
        "psm: cache, whole images": lambda: psm_crops(whole.streamed),
        "psm: cache, squares (colors too)": lambda: psm_squares(squares),
    }
    define_missing_operators()  # some builds of torchvision lack them
    with contextlib.suppress(ImportError):
        from torchvision import datasets, transforms

        crop = transforms.Compose([transforms.RandomResizedCrop(SIZE), transforms.PILToTensor()])
        found["torchvision: ImageFolder"] = lambda: through(datasets.ImageFolder(str(root), crop))
        with contextlib.suppress(ImportError):
            web = web_dataset([str(file) for file in shards], crop)
            found["webdataset: its own loader"] = lambda: through(web)
        with contextlib.suppress(ImportError):
            dataset = hugging_face(root, folder, crop)
            found["datasets: saved to disk"] = lambda: through(dataset)
    return found


def web_dataset(shards: list[str], crop: Callable) -> object:
    import webdataset

    pipeline = webdataset.WebDataset(shards, shardshuffle=100, nodesplitter=webdataset.split_by_node)
    return pipeline.shuffle(500).decode("pil").to_tuple("jpg", "cls").map_tuple(crop, lambda label: label)


def hugging_face(root: Path, folder: Path, crop: Callable) -> object:
    import datasets

    datasets.disable_progress_bars()
    files = sorted(map(str, root.rglob("*.jpg")))
    content = {"image": [{"bytes": Path(file).read_bytes(), "path": None} for file in files]}
    made = datasets.Dataset.from_dict(content, features=datasets.Features({"image": datasets.Image()}))
    made.save_to_disk(str(folder / "hf"))
    return datasets.load_from_disk(str(folder / "hf")).with_transform(
        lambda rows: {"image": [crop(image.convert("RGB")) for image in rows["image"]]}
    )


def cpu_seconds() -> float:
    """CPU time of this process and of those that it has waited for."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def rates(folder: Path, arguments: argparse.Namespace) -> list[dict]:
    """Images a second and CPU time an image, of every contender in turns."""
    root = make_images(arguments.images, folder / "images", arguments.count)
    cpu: dict[str, list[float]] = {}

    def measured(name: str, work: Callable[[], int]) -> float:
        began, used = time.perf_counter(), cpu_seconds()
        count = work()
        cpu.setdefault(name, []).append(1e3 * (cpu_seconds() - used) / count)
        return count / (time.perf_counter() - began)

    works = {name: functools.partial(measured, name, work) for name, work in contenders(folder, root).items()}
    taken = in_turns(works, arguments.turns)
    base = "webdataset: its own loader"
    rows = []
    print(f"{'':36} {'images/s':>24} {'CPU ms an image':>20} {'times webdataset, by CPU':>28}")
    for name, values in taken.items():
        used = cpu[name][1:]
        times = [other / own for own, other in zip(used, cpu.get(base, [0, *used])[1:], strict=True)]
        row = {"of": name, "images a second": spread(values), "CPU ms": spread(used), "times webdataset": spread(times)}
        rows.append(row)
        print(f"{name:36} {shown(spread(values), 0):>24} {shown(spread(used)):>20} {shown(spread(times), 1):>28}")
    return rows


def start(folder: Path, count: int) -> list[dict]:
    """Seconds until a folder of many tiny files can be trained on, the first and the following times."""
    random = np.random.default_rng(0)
    blobs = []
    for _ in range(100):
        buffer = io.BytesIO()
        Image.fromarray(random.integers(0, 256, (32, 32, 3), dtype=np.uint8)).save(buffer, "JPEG")
        blobs.append(buffer.getvalue())
    for number in range(count):
        path = folder / "many" / f"class{number % 100:02}" / f"{number:06}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(blobs[number % 100])
    time.sleep(2.5)  # folders that changed just now are not indexed
    script = (
        "import sys, time\nfrom psm.config.schema import ImagesConfig\nfrom psm.data import load_dataset\n"
        "start, cpu = time.perf_counter(), time.process_time()\n"
        "data = load_dataset(sys.argv[1], ImagesConfig(cache=sys.argv[2], size=32), progress=False)\n"
        "print(len(data.train), time.perf_counter() - start, time.process_time() - cpu)"
    )
    rows = []
    for name in ("first", "second", "third"):
        command = [sys.executable, "-c", script, str(folder / "many"), str(folder / "cache")]
        images, wall, cpu = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
        rows.append({"start": name, "files": count, "seconds": float(wall), "CPU seconds": float(cpu)})
        print(f"{name} start with {count:,} files ({images} train): {float(wall):.1f} s, {float(cpu):.1f} s of CPU")
    return rows


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[str]:
    """A folder as a web server on this machine."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *given: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()


def memory(folder: Path, arguments: argparse.Namespace) -> list[dict]:
    """Memory and disk while one epoch is read from shards of ten times the allowed cache."""
    root = make_images(arguments.images, folder / "images", max(arguments.count, 10 * SHARDS))
    total = sum(file.stat().st_size for file in root.rglob("*.*"))
    written = write_shards(str(root), str(folder / "web" / "%06d.tar"), ImagesConfig(), total / SHARDS, progress=False)
    last = len(written.files) - 1
    allowed = written.bytes / 10
    window, batch = 4, 16
    with serving(folder / "web") as url:
        config = ImagesConfig(
            cache=str(folder / "cache"), size=SIZE, labels="none", window=window, shard_cache=allowed / 1e9
        )
        images = load_dataset(f"{url}/{{000000..{last:06}}}.tar", config, progress=False).train
        before, most_disk, most_memory = resident(), 0.0, 0.0
        views = Views(ViewsConfig(size=SIZE), SIZE, (0.5,) * 3, (0.2,) * 3)
        for _ in StreamLoader(images.streamed, batch, 0, draws(views, batch), SIZE, workers=WORKERS):
            copies = (folder / "cache" / "shards").glob("*.tar")
            with contextlib.suppress(FileNotFoundError):  # removed just now
                most_disk = max(most_disk, sum(copy.stat().st_size for copy in copies))
            most_memory = max(most_memory, resident())
    row = {
        "set MB": written.bytes / 1e6, "allowed MB": allowed / 1e6, "most copies MB": most_disk / 1e6,
        "memory before MB": before / 1e6, "most memory MB": most_memory / 1e6,
        "images": len(images), "shards": last + 1, "window": window,
    }  # fmt: skip
    print(", ".join(f"{name} {value:,.1f}" for name, value in row.items()))
    return [row]


def resident() -> float:
    """Bytes that this process and its workers hold in memory of their own (proportional share)."""
    total = 0.0
    children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
    for process in (str(os.getpid()), *children):
        with contextlib.suppress(OSError):
            lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
            total += next(float(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
    return total


if __name__ == "__main__":
    main()
