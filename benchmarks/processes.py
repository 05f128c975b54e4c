"""Search and loss of PSM on 1, 2 and 4 processes (gloo): what a process computes, and the rows that it holds.

    python benchmarks/processes.py [--batch 512] [--bank 16384] [--repeats 7]

Measured is the CPU time of the thread that computes, one thread a process, which other programs on the machine and
processes that wait for each other do not change much. In turns: anchors shared out; shared out with the bank; and every
process computing all anchors, as a loss does that does not know of other processes.
"""

import argparse
import multiprocessing
import os
import socket
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from psm.losses.method_loss import method_loss
from psm.methods import get_method
from psm.mining.memory_bank import MemoryBank
from psm.mining.processes import ONE_PROCESS
from psm.models.outputs import Embeddings
from psm.training.distributed import processes
from turns import keep, shown, spread

WIDTH = 128
WAYS = ("shared out", "bank too", "all on each")


def worker(rank: int, count: int, port: int, arguments: argparse.Namespace, results: Any) -> None:
    torch.set_num_threads(1)
    if count > 1:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        dist.init_process_group("gloo", rank=rank, world_size=count)
    random = torch.Generator().manual_seed(0)
    parts = torch.randn(3, 2, arguments.batch, WIDTH, generator=random)
    rows, ids = torch.randn(arguments.bank, WIDTH, generator=random), torch.arange(arguments.batch)
    spec = get_method("psm")
    banks = {}
    for way in WAYS:
        banks[way] = MemoryBank(arguments.bank, WIDTH)
        if way == "bank too":
            banks[way].share_out(processes())
        banks[way].enqueue(rows, torch.arange(arguments.bank) + arguments.batch)
    taken: dict[str, list[float]] = {way: [] for way in WAYS}
    losses = {}
    for _ in range(arguments.repeats + 1):
        for way in WAYS:
            embeddings = Embeddings(parts[0], parts[1].clone().requires_grad_(), parts[2])
            who = ONE_PROCESS if way == "all on each" else processes()
            start = time.thread_time()
            loss = method_loss(
                embeddings, spec.criterion, banks[way], ids, torch.Generator().manual_seed(1), processes=who
            ).loss
            loss.backward()
            taken[way].append(1000 * (time.thread_time() - start))
            losses[way] = loss.item()
    if rank == 0:
        held = {way: len(bank.rows) for way, bank in banks.items()}
        results.put({way: (taken[way][1:], held[way], losses[way]) for way in WAYS})
    if count > 1:
        dist.destroy_process_group()


def start(function: Any, count: int, *given: Any) -> Any:
    """Run ``function(rank, count, port, *given, results)`` in so many processes to their end; returns the queue.

    They are forks of one that has imported the library, which takes seconds.
    """
    multiprocessing.set_forkserver_preload(["psm.training.module"])
    results = multiprocessing.get_context("forkserver").SimpleQueue()
    mp.start_processes(function, (count, free_port(), *given, results), nprocs=count, start_method="forkserver")
    return results


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--bank", type=int, default=16384)
    parser.add_argument("--repeats", type=int, default=7)
    arguments = parser.parse_args()
    print(f"batch {arguments.batch}, bank {arguments.bank:,}; rank 0")
    print("| processes | way | CPU ms (smallest – largest) | of all on each | rows held | loss |")
    print("| --- | --- | --- | --- | --- | --- |")
    rows = []
    for count in (1, 2, 4):
        measured = start(worker, count, arguments).get()
        for way, (taken, held, loss) in measured.items():
            ratio = spread([a / b for a, b in zip(taken, measured["all on each"][0], strict=True)])
            rows.append(
                {"processes": count, "way": way, "CPU ms": spread(taken), "of all on each": ratio, "rows": held}
            )
            print(
                f"| {count} | {way} | {shown(spread(taken), 0)} | {shown(ratio)} | {held:,} | {loss:.5f} |", flush=True
            )
    keep("processes", {"batch": arguments.batch, "bank": arguments.bank, "rows": rows})


if __name__ == "__main__":
    main()
