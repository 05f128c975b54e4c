"""Whole-pipeline training throughput, decoded images to updated weights: psm beside lightly and beside bare networks.

    bash benchmarks/make-peers PEERS
    python benchmarks/pipeline.py --peers PEERS

Batch 256 at 32 pixels in float32 with the same encoder and heads. Each contender runs in a process of its own and they
take turns; ratios are taken within a turn. lightly runs with whichever of one or two worker processes was fastest in a
trial before, once as its examples put it together and once with networks and views moved to channels-last by hand, as
psm does by itself. The floor is forward and backward of the same networks on ready tensors, once as psm has them and
once by torch's own functions. Rows of methods and networks that are not measured this time stay in the results as they
were.

`--avx2` keeps all contenders from AVX-512, which most laptops do not have.
"""

import argparse
import itertools
import os
import statistics
import sys
from pathlib import Path

from turns import Contender, in_turns, keep, kept_before, shown, spread

HERE = Path(__file__).resolve().parent
METHODS = ("simclr", "byol", "mocov2", "nnclr")
NETWORKS = ("resnet18-imagenet", "tiny-cifar", "tiny-imagenet")  # encoder and stem
AVX2 = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}


def start(python: str, script: str, threads: int, *arguments: object) -> Contender:
    environment = os.environ | {"PYTHONPATH": str(HERE.parent / "src"), "OMP_NUM_THREADS": str(threads)}
    command = [python, "-W", "ignore", str(HERE / "contenders" / script), *map(str, arguments)]
    return Contender(command, environment)


def best_workers(python: str, threads: int, *work: object) -> int:
    """The number of worker processes with which lightly is fastest."""
    seconds = {}
    for workers in (1, 2):
        contender = start(python, "lightly_training.py", threads, *work, threads, workers, 0)
        contender.seconds(1)
        seconds[workers] = contender.seconds(3)
        contender.stop()
    return min(seconds, key=seconds.get)


def compare(method: str, network: str, options: argparse.Namespace) -> dict:
    encoder, stem = network.split("-")
    work = (method, encoder, stem, options.batch)
    threads, peers = options.threads, str(options.peers / "bin" / "python")
    workers = best_workers(peers, threads, *work)
    contenders = {
        "psm": start(sys.executable, "psm_training.py", threads, *work, threads),
        "bare": start(sys.executable, "bare_networks.py", threads, *work, threads, 0),
        "bare, torch": start(sys.executable, "bare_networks.py", threads, *work, threads, 1),
        "lightly": start(peers, "lightly_training.py", threads, *work, threads, workers, 0),
        "lightly, channels-last": start(peers, "lightly_training.py", threads, *work, threads, workers, 1),
    }
    steps = {name: max(2, options.steps // 2) if "lightly" in name else options.steps for name in contenders}
    try:
        rates = in_turns(
            {
                name: lambda c=contender, n=steps[name]: n * options.batch / c.seconds(n)
                for name, contender in contenders.items()
            },
            options.turns,
        )
    finally:
        for contender in contenders.values():
            contender.stop()
    ratios = {
        other: spread([own / rate for own, rate in zip(rates["psm"], rates[other], strict=True)])
        for other in contenders
    }
    return {
        "method": method,
        "encoder": encoder,
        "stem": stem,
        "images a second": {name: statistics.median(values) for name, values in rates.items()},
        "times lightly": ratios["lightly"],
        "of bare networks": ratios["bare"],
        "of bare networks by torch": ratios["bare, torch"],
        "times lightly, channels-last": ratios["lightly, channels-last"],
        "lightly's workers": workers,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--peers", type=Path, required=True, help="environment made by benchmarks/make-peers")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--networks", nargs="+", default=list(NETWORKS), choices=NETWORKS)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--steps", type=int, default=6, help="of psm in a turn; lightly takes half as many")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--avx2", action="store_true", help="keep all contenders from AVX-512")
    options = parser.parse_args()
    if options.avx2:
        os.environ |= AVX2  # the contenders inherit it
    line = "{:8} {:17} {:>26} {:>20} {:>22} {:>20} {:>20}".format
    print(
        line(
            "method",
            "network",
            "images a second",
            "times lightly",
            "its channels-last",
            "of bare networks",
            "… by torch",
        )
    )
    rows = []
    for network, method in itertools.product(options.networks, options.methods):
        row = compare(method, network, options)
        rows.append(row)
        rates = ", ".join(f"{rate:.0f}" for rate in row["images a second"].values())
        kinds = ("times lightly", "times lightly, channels-last", "of bare networks", "of bare networks by torch")
        print(line(method, network, rates, *(shown(row[kind]) for kind in kinds)), flush=True)
    measured = {pair(row) for row in rows}
    import torch  # not before the contenders' instructions are settled, which it goes by too

    name = f"pipeline-{torch.backends.cpu.get_cpu_capability().lower()}"
    kept = [row for row in kept_before(name) if pair(row) not in measured]
    places = {both: place for place, both in enumerate(itertools.product(NETWORKS, METHODS))}
    keep(name, sorted(kept + rows, key=lambda row: places[pair(row)]))


def pair(row: dict) -> tuple[str, str]:
    """What was measured in a row: network and method."""
    return f"{row['encoder']}-{row['stem']}", row["method"]


if __name__ == "__main__":
    main()
