"""`psm embed` beside the encoder's own forward pass on ready tensors and beside lightly's embed.

    python benchmarks/embed.py RUN FOLDER [--peers PEERS] [--images 2000] [--turns 3] [--threads 2]

Images a second, in turns. ``forward``: the encoder on inputs that are ready in memory, with psm's kernels. ``decoded``:
`psm embed` of images that are decoded already, from there to the file. ``files``: `psm embed` of the image files.
``lightly``: its `SelfSupervisedEmbedding.embed` of the same files with the same encoder, in a process of its own, with
as many loader processes as threads; what it would write is not counted.
"""

import argparse
import os
import shutil
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

import psm
from psm import ops
from psm.config.schema import ImagesConfig
from psm.data.stream import image_stream
from psm.embedding.encoder import open_encoder
from psm.evaluation.features import frozen
from turns import Contender, in_turns, keep, shown, spread

HERE = Path(__file__).resolve().parent
BATCH = 256


def sample(folder: Path, out: Path, count: int) -> int:
    """Copy image files, evenly spaced, into a folder of one class each, as lightly's dataset reads them."""
    files = sorted(path for path in folder.rglob("*") if path.suffix.lower() in (".jpeg", ".jpg", ".png"))
    chosen = np.linspace(0, len(files) - 1, min(count, len(files))).round().astype(int)
    for number, index in enumerate(chosen.tolist()):
        shutil.copyfile(files[index], out / f"{number:06}{files[index].suffix.lower().replace('jpeg', 'jpg')}")
    return len(chosen)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--peers", type=Path, help="environment made by make-peers")
    parser.add_argument("--images", type=int, default=2000)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    loaded = open_encoder(options.run)
    with tempfile.TemporaryDirectory() as place:
        folder, out = Path(place) / "images", Path(place) / "features.npy"
        folder.mkdir()
        count = sample(options.folder, folder, options.images)
        with image_stream(folder, ImagesConfig(size=loaded.info.size), progress=False) as stream:
            pixels = torch.from_numpy(stream.read(np.arange(count))[0])
        inputs = loaded.views.plain(pixels).to(memory_format=torch.channels_last)
        decoded = psm.data.ImageDataset("decoded", psm.data.ImageStore(pixels), None, ())

        @torch.inference_mode()
        def forward() -> None:
            with frozen(loaded.module), ops.accelerated(loaded.module, torch.device("cpu")):
                for batch in inputs.split(BATCH):
                    loaded.module(batch)

        def embed(data: object) -> None:
            psm.embed(options.run, data, out, overwrite=True, progress=False, batch_size=BATCH)

        def rate(work: object) -> float:
            start = time.perf_counter()
            work()
            return count / (time.perf_counter() - start)

        works = {
            "forward": lambda: rate(forward),
            "decoded": lambda: rate(lambda: embed(decoded)),
            "files": lambda: rate(lambda: embed(folder)),
        }
        contender = None
        if options.peers:
            environment = os.environ | {"PYTHONPATH": str(HERE.parent / "src"), "PSM_KERNELS": "0"}
            script = [
                str(HERE / "contenders" / "lightly_embed.py"),
                str(options.run),
                str(folder),
                str(options.threads),
            ]
            contender = Contender([str(options.peers / "bin" / "python"), *script], environment)
            works["lightly"] = lambda: count / contender.seconds(1)
        rates = in_turns(works, options.turns)
        if contender is not None:
            contender.stop()
    print(f"{count} images of {loaded.info.size} pixels, encoder {loaded.info.encoder}, {options.threads} threads")
    for name, values in rates.items():
        print(f"{name:10} {shown(spread(values), 0)} images a second", flush=True)
    results = {"images": count, "size": loaded.info.size, "encoder": loaded.info.encoder, "threads": options.threads}
    results["rates"] = {name: spread(values) for name, values in rates.items()}
    for name, base in (("decoded", "forward"), ("files", "forward"), ("files", "lightly")):
        if base in rates:
            ratio = spread([a / b for a, b in zip(rates[name], rates[base], strict=True)])
            print(f"{name} / {base}: {shown(ratio)}", flush=True)
            results[f"{name} / {base}"] = ratio
    keep("embed", results)


if __name__ == "__main__":
    main()
