"""What reading images costs here: decoding a JPEG file into the crops of two views, and the index of shards."""

import io
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path

import numpy as np
from PIL import Image

from psm.config.schema import ViewsConfig
from psm.data.decode import decode_crops
from psm.utils.seeding import generator
from psm.views.transform import Views

SIZE, SIDES = 224, (500, 375)
FILES, INDEXED = 40, 200_000


def photograph(random: np.random.Generator) -> bytes:
    """A JPEG file of about 90 kB, near ImageNet's mean of 110: smooth colors with the noise of a camera."""
    coarse = Image.fromarray(random.integers(0, 256, (6, 8, 3), dtype=np.uint8)).resize(SIDES, Image.Resampling.BICUBIC)
    pixels = np.asarray(coarse, float) + random.normal(0, 18.0, (*SIDES[::-1], 3))
    buffer = io.BytesIO()
    Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8)).save(buffer, "JPEG", quality=90)
    return buffer.getvalue()


def decode_milliseconds(repeats: int = 3) -> float:
    """CPU milliseconds to decode a photograph into the crops of two views of 224 pixels."""
    random = np.random.default_rng(0)
    files = [photograph(random) for _ in range(FILES)]
    views = Views(ViewsConfig(size=SIZE), SIZE, (0.5,) * 3, (0.2,) * 3)
    draws = views.sample_params(FILES, generator(0, "views", 0)).crop_draws(views.settings.crop_ratio)
    taken = []
    for _ in range(repeats + 1):
        start = time.process_time()
        for row, content in enumerate(files):
            decode_crops(content, lambda height, width, row=row: draws.boxes(row, height, width), SIZE)
        taken.append(1e3 * (time.process_time() - start) / FILES)
    return min(taken[1:])


def index_cost() -> dict[str, float]:
    """What a start with an index in the cache takes: CPU seconds a million images, and memory an image, a process."""
    with tempfile.TemporaryDirectory() as folder:
        shards = 20
        for shard in range(shards):
            with tarfile.open(f"{folder}/{shard:06}.tar", "w") as tar:
                for number in range(INDEXED // shards):
                    info = tarfile.TarInfo(f"n{shard:08}/{number:08}.jpg")
                    info.size = 10
                    tar.addfile(info, io.BytesIO(b"0123456789"))
        command = [sys.executable, __file__, folder]
        first, second = (subprocess.run(command, check=True, capture_output=True, text=True) for _ in range(2))
    seconds, selection, held, peak = map(float, second.stdout.split())
    return {
        "first start, s a million": 1e6 * float(first.stdout.split()[0]) / INDEXED,
        "later start, s a million": 1e6 * seconds / INDEXED,
        "with held-out images, s a million": 1e6 * (seconds + selection) / INDEXED,
        "bytes an image": held / INDEXED,
        "peak bytes an image": peak / INDEXED,
    }


def index_shards(folder: str) -> None:
    """In a process of its own: print the CPU seconds of the index and of its splits, its bytes, and how memory grew."""
    from psm.config.schema import ImagesConfig
    from psm.data.shard_cache import ShardCache
    from psm.data.shard_index import build_index
    from psm.data.streamed import StreamedImages

    addresses = sorted(map(str, Path(folder).glob("*.tar")))
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    before = memory("VmRSS")
    start = time.process_time()
    index = build_index(addresses, ShardCache(Path(folder) / "cache", 1e9), Path(folder), ImagesConfig(), False)
    seconds = time.process_time() - start
    table, config = index.table, ImagesConfig()
    cache = ShardCache(Path(folder) / "cache", 1e9)
    images = StreamedImages(index.shards, table, index.names, SIZE, cache, config)
    images.select(np.arange(len(images))[:: max(2, round(1 / config.test_share))])
    images.select(np.arange(len(images) * 9 // 10))
    selection = time.process_time() - start - seconds
    held = sum(column.nbytes for column in (table.shard, table.offset, table.bytes, table.label))
    held += sum(map(len, index.names[:])) + 4 * len(index.names)
    print(seconds, selection, held, memory("VmHWM") - before)


def memory(name: str) -> int:
    """Bytes of this process, by a line of its status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(name))


if __name__ == "__main__":
    index_shards(sys.argv[1])
