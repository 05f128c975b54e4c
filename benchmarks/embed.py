"""`psm embed` beside the encoder's own forward pass on ready tensors and beside lightly's embed.

    python benchmarks/embed.py RUN FOLDER [--peers PEERS] [--images 20000] [--turns 5] [--threads 2]

Images a second, in turns. ``forward``: the encoder on inputs that are ready in memory, with psm's kernels. ``decoded``:
`psm embed` of images that are decoded already, from there to the file. ``files``: `psm embed` of the image files.
``command``: the same as a command, the start of Python and the loading of libraries included. ``lightly``: its
`SelfSupervisedEmbedding.embed` of the same files with the same encoder, in a process of its own, with as many loader
processes as threads; what it would write is not counted.

What each call begins with (opening encoder and file) is measured by a call with few images. ``decoded`` and ``files``
are rates without it, over the other images; ``..., whole call`` is all images over the time of the whole call.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import numpy as np
import torch

import psm
from psm import ops
from psm.config.schema import ImagesConfig
from psm.data.stream import image_stream
from psm.embedding.encoder import LoadedEncoder, open_encoder
from psm.evaluation.features import frozen
from turns import Contender, in_turns, keep, shown, spread, timed

HERE = Path(__file__).resolve().parent
BATCH = 256
FEW = 256  # images of a call that measures what every call begins with
READY = 4096  # inputs of the forward pass that are held in memory
COMPARED = (
    ("decoded", "forward"),
    ("decoded, whole call", "forward"),
    ("files", "forward"),
    ("files, whole call", "lightly"),
    ("command", "lightly"),
)


def sample(folder: Path, out: Path, count: int) -> int:
    """Copy image files, evenly spaced, into a flat folder, as lightly's dataset reads it too."""
    files = sorted(path for path in folder.rglob("*") if path.suffix.lower() in (".jpeg", ".jpg", ".png"))
    chosen = np.linspace(0, len(files) - 1, min(count, len(files))).round().astype(int)
    out.mkdir()
    for number, index in enumerate(chosen.tolist()):
        shutil.copyfile(files[index], out / f"{number:06}{files[index].suffix.lower().replace('jpeg', 'jpg')}")
    return len(chosen)


@torch.inference_mode()
def forward(encoder: LoadedEncoder, inputs: torch.Tensor, count: int) -> None:
    """Forward passes of so many images, over and over the same inputs."""
    batches = inputs.split(BATCH)
    with frozen(encoder.module), ops.accelerated(encoder.module, torch.device("cpu")):
        for start in range(0, count, BATCH):
            encoder.module(batches[start // BATCH % len(batches)][: count - start])


def rates_of(seconds: dict[str, list[float]], count: int) -> dict[str, list[float]]:
    """Images a second in each turn, without what a call with few images takes too, and of whole calls."""
    rates = {name: [count / s for s in seconds[name]] for name in ("forward", "command", "lightly") if name in seconds}
    for name in ("decoded", "files"):
        pairs = zip(seconds[name], seconds[f"{name}, few"], strict=True)
        rates[name] = [(count - FEW) / (whole - few) for whole, few in pairs]
        rates[f"{name}, whole call"] = [count / whole for whole in seconds[name]]
    return rates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--peers", type=Path, help="environment made by make-peers")
    parser.add_argument("--images", type=int, default=20_000)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    ops.keep_freed_memory()  # as the command does; for the forward pass alone too
    encoder = open_encoder(options.run)
    threads = {"OMP_NUM_THREADS": str(options.threads), "PYTHONPATH": str(HERE.parent / "src")}
    with tempfile.TemporaryDirectory() as place:
        folder, few, out = Path(place) / "images", Path(place) / "few", Path(place) / "features.npy"
        count = sample(options.folder, folder, options.images)
        sample(folder, few, FEW)
        with image_stream(folder, ImagesConfig(size=encoder.info.size), progress=False) as stream:
            pixels = stream.read(np.arange(count))[0]
        inputs = encoder.views.plain(torch.from_numpy(pixels[:READY])).to(memory_format=torch.channels_last)
        decoded, few_decoded = (
            psm.data.ImageDataset("decoded", psm.data.ImageStore(some), None, ()) for some in (pixels, pixels[:FEW])
        )

        def embed(data: object) -> None:
            psm.embed(options.run, data, out, overwrite=True, progress=False, batch_size=BATCH)

        command = [sys.executable, "-m", "psm", "embed", str(options.run), f"data={folder}", f"out={out}"]
        settings = ["overwrite=true", "progress=false", f"batch_size={BATCH}"]
        start = partial(subprocess.run, env=os.environ | threads, check=True, stdout=subprocess.DEVNULL)
        works = {
            "forward": lambda: timed(lambda: forward(encoder, inputs, count)),
            "decoded": lambda: timed(lambda: embed(decoded)),
            "decoded, few": lambda: timed(lambda: embed(few_decoded)),
            "files": lambda: timed(lambda: embed(folder)),
            "files, few": lambda: timed(lambda: embed(few)),
            "command": lambda: timed(lambda: start([*command, *settings])),
        }
        contender = None
        if options.peers:
            script = HERE / "contenders" / "lightly_embed.py"
            python = options.peers / "bin" / "python"
            arguments = [str(options.run), str(folder), str(options.threads)]
            environment = os.environ | threads | {"PSM_KERNELS": "0"}
            contender = Contender([str(python), str(script), *arguments], environment)
            works["lightly"] = lambda: contender.seconds(1)
        seconds = in_turns(works, options.turns)
        if contender is not None:
            contender.stop()
    rates = rates_of(seconds, count)
    print(f"{count} images of {encoder.info.size} pixels, encoder {encoder.info.encoder}, {options.threads} threads")
    for name, values in rates.items():
        print(f"{name:20} {shown(spread(values), 0)} images a second")
    results = {"images": count, "size": encoder.info.size, "encoder": encoder.info.encoder, "threads": options.threads}
    results["rates"] = {name: spread(values) for name, values in rates.items()}
    for name, base in COMPARED:
        if base in rates:
            ratio = spread([a / b for a, b in zip(rates[name], rates[base], strict=True)])
            print(f"{name} / {base}: {shown(ratio)}")
            results[f"{name} / {base}"] = ratio
    keep(f"embed-{encoder.info.encoder}", results)


if __name__ == "__main__":
    main()
