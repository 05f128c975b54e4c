"""A cost model of PSM's step on several processes: measured parts, checked here, extrapolated to 64 GPUs.

    python benchmarks/cost_model.py [--rounds 3]

Measured here, one thread a process, in CPU time: the parts of a step of one rank of 1, 2 and 4 (simulated, without the
others), a gloo collective as calls and bytes, decoding a JPEG file into two crops, the index of shards. Their sum is
compared with real steps under DistributedDataParallel on as many processes. The extrapolation takes the collectives
of a simulated rank of 64 and published figures of the hardware, which are assumptions and marked as such.
"""

import argparse
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from cost_data import decode_milliseconds, index_cost
from cost_gpus import extrapolate
from processes import free_port, start
from simulated_rank import Rank, Shape, Traffic, recorded, simulated
from turns import keep

COUNTS = (1, 2, 4)
SMALL, LARGE = 256, 4 << 20  # bytes of the two collectives that the cost is fitted to
PARTS = ("views", "DDP, forward", "networks, forward", "loss", "backward", "update")


def repeated(work: Callable[[], Any], repeats: int) -> float:
    """CPU milliseconds of one call."""
    work()
    start = time.process_time()
    for _ in range(repeats):
        work()
    return 1e3 * (time.process_time() - start) / repeats


def simulate(shape: Shape, world: int, steps: int) -> tuple[dict[str, float], Traffic]:
    """CPU milliseconds of the parts of a step of one rank of so many, and its collectives in a step."""
    traffic = Traffic()
    with simulated(world):
        rank = Rank(shape, 0, world)
        wrapped = DistributedDataParallel(rank) if world > 1 else rank  # in the group of this process alone
        with recorded(traffic):
            rank.step(wrapped)
        rank.step(wrapped)
        rank.seconds.clear()
        for _ in range(steps):
            rank.step(wrapped)
    return {part: 1e3 * seconds / steps for part, seconds in rank.seconds.items()}, traffic


def join(rank: int, world: int, port: int) -> None:
    """Enter a process group."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "Grad strides do not match")  # of layers that run channels-last
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)


def worker(rank: int, world: int, port: int, shape: Shape, steps: int, results: Any) -> None:
    """Real steps of one rank, and what a collective costs it."""
    join(rank, world, port)
    traffic, costs = Traffic(), {}
    if world > 1:
        for name, size in (("small", SMALL), ("large", LARGE)):
            tensor = torch.ones(size // 4)
            parts = [torch.empty_like(tensor) for _ in range(world)]
            repeats = 100 if name == "small" else 8
            costs[f"reduce, {name}"] = repeated(lambda t=tensor: dist.all_reduce(t), repeats)
            costs[f"gather, {name}"] = repeated(lambda p=parts, t=tensor: dist.all_gather(p, t), repeats)
    own = Rank(shape, rank, world)
    wrapped = DistributedDataParallel(own) if world > 1 else own
    with recorded(traffic):
        own.step(wrapped)
    own.step(wrapped)
    milliseconds = repeated(lambda: own.step(wrapped), steps)
    results.put((rank, milliseconds, traffic.rows(), costs))
    dist.destroy_process_group()


def measure(shape: Shape, world: int, steps: int) -> tuple[float, dict[str, list[int]], dict[str, float]]:
    """CPU milliseconds of a step (mean over the ranks), the collectives and the cost of one."""
    results = start(worker, world, shape, steps)
    found = sorted(results.get() for _ in range(world))
    costs = {name: statistics.mean(row[3][name] for row in found) for name in found[0][3]}
    return statistics.mean(row[1] for row in found), found[0][2], costs


def collectives(traffic: dict[str, list[int]], costs: dict[str, float], weights: int, buffers: int) -> float:
    """CPU milliseconds that the collectives of a step take: calls and bytes by the fitted costs."""

    def cost(kind: str, calls: int, size: float) -> float:
        per_byte = (costs[f"{kind}, large"] - costs[f"{kind}, small"]) / (LARGE - SMALL)
        return calls * costs[f"{kind}, small"] + size * per_byte

    gathers = traffic.get("gather", [0, 0])
    reduces = [value for name, value in traffic.items() if name != "gather"]
    calls, size = (sum(row[place] for row in reduces) for place in (0, 1))
    return cost("gather", *gathers) + cost("reduce", calls, size) + cost("reduce", 2, weights + buffers)


def check(shape: Shape, rounds: int, steps: int) -> list[dict[str, Any]]:
    """The predicted and the measured step on 1, 2 and 4 processes."""
    reference = Rank(shape, 0, 1)
    weights = sum(p.numel() * 4 for p in reference.parameters() if p.requires_grad)
    buffers = sum(b.numel() * b.element_size() for b in reference.networks.buffers())
    simulations: dict[int, list[dict[str, float]]] = {count: [] for count in COUNTS}
    measured: dict[int, list[tuple]] = {count: [] for count in COUNTS}
    traffic = {}
    for _ in range(rounds):  # in turns
        for count in COUNTS:
            parts, recorded_traffic = simulate(shape, count, steps)
            simulations[count].append(parts)
            traffic[count] = recorded_traffic.rows()
            measured[count].append(measure(shape, count, steps))
            if measured[count][-1][1] != traffic[count]:
                raise SystemExit(f"the collectives of a simulated rank of {count} are not those of a real one")
    rows = []
    for count in COUNTS:
        parts = {part: statistics.median(row[part] for row in simulations[count]) for part in PARTS}
        exchanged = 0.0
        if count > 1:
            names = measured[count][0][2]
            costs = {name: statistics.median(row[2][name] for row in measured[count]) for name in names}
            exchanged = collectives(traffic[count], costs, weights, buffers)
        steps_taken = [row[0] for row in measured[count]]
        predicted = sum(parts.values()) + exchanged
        rows.append(
            {
                "processes": count,
                "parts": parts,
                "collectives": exchanged,
                "predicted": predicted,
                "measured": statistics.median(steps_taken),
                "least": min(steps_taken),
                "most": max(steps_taken),
                "traffic": traffic[count],
                "gradients": weights if count > 1 else 0,
            }
        )
        print(
            f"{count} processes: predicted {predicted:.0f} ms of CPU a rank ({exchanged:.0f} of them collectives), "
            f"measured {rows[-1]['measured']:.0f} ({min(steps_taken):.0f} - {max(steps_taken):.0f})",
            flush=True,
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--bank", type=int, default=16384)
    parser.add_argument("--encoder", default="tiny")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3, help="steps of a measurement")
    arguments = parser.parse_args()
    join(0, 1, free_port())
    shape = Shape(arguments.batch, arguments.bank, arguments.encoder)
    checked = check(shape, arguments.rounds, arguments.steps)
    decode, index = decode_milliseconds(), index_cost()
    print(f"decoding into two crops of 224: {decode:.2f} ms of CPU an image; index of shards: {index}")
    keep(
        "cost_model",
        {"shape": vars(shape), "check": checked, "decode ms": decode, "index": index}
        | extrapolate(decode, index["bytes an image"], lambda shape, world: simulate(shape, world, 1)[1]),
    )


if __name__ == "__main__":
    main()
