"""How processes find out which one they are, and what they tell each other before training begins."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers import start_psm
from psm.config.schema import PretrainConfig
from psm.training import exchange
from psm.training.exchange import Exchange
from psm.training.launch import Launch, find_launch
from psm.utils.checkpoint_file import read_checkpoint
from psm.utils.errors import UserError

TORCHRUN = {"TORCHELASTIC_RUN_ID": "x", "RANK": "5", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}
SLURM = {"SLURM_NTASKS": "4", "SLURM_NNODES": "2", "SLURM_PROCID": "3", "SLURM_JOB_NAME": "train"}
BY_HAND = {"MASTER_ADDR": "a", "MASTER_PORT": "1", "NODE_RANK": "1"}


@pytest.mark.parametrize(
    ("variables", "keys", "expected"),
    [
        ({}, {}, Launch()),
        (TORCHRUN, {}, Launch("torchrun", 5, 4, 2)),
        (TORCHRUN, {"devices": "4", "num_nodes": 2}, Launch("torchrun", 5, 4, 2)),
        (SLURM, {}, Launch("SLURM", 3, 2, 2)),
        (SLURM, {"devices": "1"}, Launch()),  # each task is a run of its own
        (SLURM | {"SLURM_JOB_NAME": "bash"}, {}, Launch()),
        (BY_HAND, {"num_nodes": 2, "devices": "2"}, Launch("by hand", 1, None, 2)),
        (BY_HAND, {}, Launch()),
    ],
)
def test_the_launcher_says_which_process_this_is(variables: Any, keys: Any, expected: Launch) -> None:
    assert find_launch(PretrainConfig(**keys), variables) == expected


@pytest.mark.parametrize(
    ("variables", "keys", "says"),
    [
        (TORCHRUN, {"devices": "1"}, "torchrun started 4 processes on a node: leave devices out"),
        (TORCHRUN, {"num_nodes": 3}, "torchrun has 2 nodes: leave num_nodes out"),
        (SLURM | {"SLURM_NTASKS": "5"}, {}, "give each node the same number of tasks"),
        ({}, {"num_nodes": 2}, "start the run by torchrun --nnodes 2 or srun"),
    ],
)
def test_keys_that_contradict_the_launcher_are_refused(variables: Any, keys: Any, says: str) -> None:
    with pytest.raises(UserError, match=says):
        find_launch(PretrainConfig(**keys), variables)


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for name, value in (("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", str(port)), ("NODE_RANK", "0")):
        monkeypatch.setenv(name, value)
    # Each exchange counts the runs of its process; here two stand for two processes.
    monkeypatch.setattr(exchange, "_runs", type("Same", (), {"__next__": lambda self: 0})())


def in_two(first: Callable[[Exchange], Any], second: Callable[[Exchange], Any], timeout: float = 20) -> list[Any]:
    """What rank 0 and rank 1 return or raise."""
    results: list[Any] = [None, None]
    kept: list[Exchange] = []  # a process keeps its own until the run ends

    def work(rank: int, function: Callable[[Exchange], Any]) -> None:
        try:
            kept.append(messages := Exchange(Launch("by hand", rank, None, 2), timeout))
            results[rank] = function(messages)
        except BaseException as error:
            results[rank] = error

    threads = [threading.Thread(target=work, args=pair) for pair in enumerate((first, second))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return results


def follow(messages: Exchange) -> Any:
    decision = messages.decision()
    with messages.getting_ready():
        pass
    return decision


def test_the_others_receive_what_rank_0_decides(place: None) -> None:
    def lead(messages: Exchange) -> str:
        with messages.deciding():
            messages.decide({"config": {"epochs": 3}})
        messages.start()
        return "started"

    assert in_two(lead, follow) == ["started", {"config": {"epochs": 3}}]


def test_a_mistake_that_rank_0_finds_ends_the_others(place: None) -> None:
    def lead(messages: Exchange) -> None:
        with messages.deciding():
            raise UserError("epochs=no is not a whole number")

    first, second = in_two(lead, follow)
    assert isinstance(second, UserError)
    assert str(first) == str(second) == "epochs=no is not a whole number"


def test_a_mistake_of_another_rank_ends_rank_0(place: None) -> None:
    def lead(messages: Exchange) -> None:
        with messages.deciding():
            messages.decide({})

    def fail(messages: Exchange) -> None:
        messages.decision()
        with messages.getting_ready():
            raise UserError("data=here does not exist")

    first, second = in_two(lead, fail)
    assert isinstance(first, UserError)
    assert str(first) == "rank 1: data=here does not exist"
    assert str(second) == "data=here does not exist"


def test_a_process_that_does_not_come_is_named(place: None) -> None:
    messages = Exchange(Launch("by hand", 0, None, 2), timeout=1)
    with pytest.raises(UserError, match=r"1 of 2 processes \(rank 1\) have not come to 127.0.0.1"):
        messages.decide({})


def test_rank_0_that_is_not_there_is_named(place: None) -> None:
    with pytest.raises(UserError, match=r"rank 1 of 2 found no rank 0 at 127.0.0.1"):
        Exchange(Launch("by hand", 1, None, 2), timeout=1)


def torchrun(out: Path, *arguments: str, port: int) -> list[subprocess.Popen[str]]:
    """Two agents of torchrun, each a node with one process."""
    launcher = (sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1")
    place = ("--master-addr", "127.0.0.1", "--master-port", str(port))
    return [
        subprocess.Popen(
            [*launcher, *place, "--node-rank", str(node), "-m", "psm", "pretrain", f"out={out}", *arguments],
            env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for node in range(2)
    ]  # fmt: skip


def finished(nodes: list[subprocess.Popen[str]]) -> tuple[list[int], str]:
    said = [node.communicate(timeout=240)[0] for node in nodes]
    return [node.returncode for node in nodes], "\n".join(said)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def test_two_nodes_under_torchrun_equal_one_process(tmp_path: Path, small_arguments: list[str]) -> None:
    keys = [*small_arguments, "epochs=1", "accelerator=cpu", "precision=64-true", "optim.lr=0.01"]
    codes, said = finished(torchrun(tmp_path / "two", *keys, port=free_port()))
    assert codes == [0, 0], said
    assert start_psm("pretrain", f"out={tmp_path / 'one'}", *keys).join() is None
    one, two = (read_checkpoint(tmp_path / name / "checkpoints" / "last.ckpt")["state_dict"] for name in ("one", "two"))
    assert one.keys() == two.keys()
    for name in one:
        assert torch.allclose(one[name].double(), two[name].double(), 1e-3, 1e-4), name


@pytest.mark.slow
def test_a_killed_rank_ends_all_and_the_resumed_run_equals_the_whole_one(
    tmp_path: Path, small_arguments: list[str]
) -> None:
    """To the bit on as many processes, to rounding on another number of them."""
    precise = ("accelerator=cpu", "precision=64-true", "optim.lr=0.01")
    keys = [*small_arguments, "epochs=4", "save.every_steps=1", "resume=auto", *precise]
    codes, said = finished(torchrun(tmp_path / "whole", *keys, port=free_port()))
    assert codes == [0, 0], said
    out = tmp_path / "parts"
    nodes = torchrun(out, *keys, port=free_port())
    while not (out / "metrics.jsonl").exists():
        assert nodes[0].poll() is None
    listed = subprocess.run(["ps", "-e", "-o", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    pairs = (map(int, line.split()) for line in listed.splitlines())
    worker = next(pid for pid, parent in pairs if parent == nodes[1].pid)
    os.kill(worker, signal.SIGKILL)
    codes, said = finished(nodes)
    assert codes == [1, 1], said
    shutil.copytree(out, tmp_path / "alone")
    codes, said = finished(torchrun(out, *keys, port=free_port()))
    assert codes == [0, 0], said
    process = start_psm("pretrain", f"out={tmp_path / 'alone'}", "resume=true")
    process.join(240)
    assert process.exitcode == 0
    whole, parts, alone = (
        read_checkpoint(tmp_path / name / "checkpoints" / "last.ckpt")["state_dict"]
        for name in ("whole", "parts", "alone")
    )
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    for name in whole:
        assert torch.allclose(whole[name].double(), alone[name].double(), 1e-3, 1e-4), name


@pytest.mark.slow
def test_a_mistake_ends_all_nodes(tmp_path: Path, small_arguments: list[str]) -> None:
    codes, said = finished(torchrun(tmp_path / "run", *small_arguments, "batch_size=33", port=free_port()))
    assert codes == [1, 1]  # torchrun's own
    assert said.count("exitcode  : 2") == 2
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_tasks_of_slurm_form_a_run_or_are_runs_of_their_own(tmp_path: Path, small_arguments: list[str]) -> None:
    keys = [*small_arguments, "epochs=1", "accelerator=cpu"]
    port = free_port()

    def tasks(*arguments: str) -> list[int]:
        variables = {"SLURM_NTASKS": "2", "SLURM_NNODES": "1", "SLURM_NODEID": "0", "SLURM_JOB_NAME": "x",
                     "SLURM_JOB_ID": "1", "SLURM_NODELIST": "127.0.0.1", "MASTER_PORT": str(port)}  # fmt: skip
        processes = [
            start_psm("pretrain", *keys, *(x.replace("RANK", rank) for x in arguments), **variables,
                      SLURM_PROCID=rank, SLURM_LOCALID=rank)
            for rank in ("0", "1")
        ]  # fmt: skip
        for process in processes:
            process.join(240)
        return [process.exitcode for process in processes]

    assert tasks(f"out={tmp_path / 'joined'}") == [0, 0]
    assert (tmp_path / "joined" / "encoder.safetensors").exists()
    assert tasks(f"out={tmp_path}/own-RANK", "devices=1", "seed=RANK") == [0, 0]
    assert all((tmp_path / f"own-{rank}" / "metrics.jsonl").exists() for rank in (0, 1))
