"""Several gloo processes are one process on the joined batch: loss, gradients, statistics, target, bank."""

import os
import socket
import subprocess
import sys
from copy import deepcopy
from pathlib import Path
from signal import SIGUSR1
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from safetensors.torch import load_file
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from psm.config.schema import MonitorConfig, ViewsConfig
from psm.data import ImageDataset, ImageStore
from psm.data.loader import rank_slice
from psm.losses import chunked as chunked_loss
from psm.methods import METHODS, get_method
from psm.mining.draws import KeyedDraws, draw_keys
from psm.mining.memory_bank import MemoryBank
from psm.models.heads import prediction_head, projection_head
from psm.models.siamese import SiameseNetworks
from psm.training import health
from psm.training.distributed import LargestOfRanks, gather, gather_rows, sync_batchnorm
from psm.training.distributed import processes as run_processes
from psm.training.measures import sampled_features
from psm.training.module import StepOutputs, step_loss
from psm.training.online_probe import OnlineProbe
from psm.training.online_scores import online_scores
from psm.training.shared_features import own_features
from psm.utils.checkpoint_file import read_checkpoint
from psm.utils.files import read_lines
from psm.views.transform import Views

BATCH, STEPS = 8, 3
KEYED = "keyed draws"  # PSM with the draws of an accelerator


# Every row, and the choices beside the paper together.
SPECS = {name: get_method(name) for name in METHODS} | {
    "choices": get_method(
        "psm",
        positives={"k": 2, "mix": True, "agree": True, "temperature": 0.1, "min_similarity": -0.5},
        target={"views": "weak"},
        weighting="hard",
        loss={"redundancy_weight": 1.0},
    ),
    "sharded": get_method("psm", bank={"sharded": True}),
    "means": get_method(
        "psm", positives={"k": 2, "mix": True, "share": 0.5}, bank={"keys": "mean"}, loss={"weight_sum": 3.0}
    ),
    KEYED: get_method("psm"),
}


class Encoder(nn.Sequential):
    width = 10

    def __init__(self) -> None:
        super().__init__(nn.Conv2d(3, 10, 3), nn.BatchNorm2d(10), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())


class Step(nn.Module):
    """What Lightning's DDP wraps: the forward is the whole loss."""

    def __init__(self, method: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.method = SPECS[method]
        head = prediction_head(5, 7, 5) if self.method.predictor.enabled else None
        self.networks = SiameseNetworks(Encoder(), projection_head(10, 7, 5), head, self.method.target.enabled)
        self.bank = MemoryBank(13, 5)  # not a multiple of the number of processes
        self._ddp_params_and_buffers_to_ignore = [f"bank.{n}" for n in ("rows", "ids", "pointer", "fill")]

    def forward(self, views: Any, ids: Any, draws: Any, chunk: Any = None) -> Any:
        weak = views.flip(-1) / 2 if self.method.target.views == "weak" else None
        positive = torch.Generator().manual_seed(7)
        return step_loss(self.networks, views, ids, self.method, self.bank, draws, chunk, weak, positive)


def train(method: Any, rank: Any, world: Any) -> Any:
    """A few steps; everything that must not depend on how many processes there are."""
    step = Step(method).double()
    if world > 1:
        sync_batchnorm(step.networks, torch.device("cpu"))
    if step.method.bank.sharded:
        step.bank.share_out(run_processes())
        assert len(step.bank.rows) == len(range(rank, 13, world)), "a process holds its share"
    wrapped = DistributedDataParallel(step) if world > 1 else step
    optimizer = torch.optim.SGD([p for p in step.parameters() if p.requires_grad], lr=0.1)
    mine, seen = rank_slice(BATCH, rank, world), []
    for index in range(STEPS):
        random = torch.Generator().manual_seed(index)
        views = torch.randn(2, BATCH, 3, 6, 6, generator=random, dtype=torch.float64)
        ids = torch.randperm(20, generator=random)[:BATCH]
        numbers = torch.Generator().manual_seed(index)
        draws = KeyedDraws(draw_keys(BATCH, numbers)) if method == KEYED else numbers
        loss, _, latest = wrapped(views[:, mine], ids[mine], draws)
        optimizer.zero_grad()
        loss.backward()
        gradients = {n: p.grad.clone() for n, p in step.named_parameters() if p.grad is not None}
        optimizer.step()
        step.networks.update_target(0.9)
        step.bank.enqueue(latest.keys, latest.ids)
        whole = {f"bank.{name}": value for name, value in step.bank.whole_state().items()}
        state = {n: v.clone() for n, v in {**step.state_dict(), **whole}.items()}
        seen.append({"loss": loss.detach(), "gradients": gradients, "state": state})
    again = deepcopy(step)
    again.bank.rows.zero_()
    again.load_state_dict(state)
    assert torch.equal(again.bank.rows, step.bank.rows), "a checkpoint holds the whole bank, and each takes its rows"
    assert (again.bank.pointer, again.bank.fill) == (step.bank.pointer, step.bank.fill)
    return seen


# Few pairs at once: chunks that begin and end within a process's anchors, and some without any of them.
CHUNKED_ANCHORS = ("psm", "mochi", "choices", "sharded")
FEW_PAIRS = 75


def everything(rank: Any, world: Any) -> Any:
    """What a process sees, for every method, and with anchors in chunks."""
    whole = {method: train(method, rank, world) for method in SPECS}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunked_loss, "PAIRS", FEW_PAIRS)
        return whole | {f"{method} in chunks": train(method, rank, world) for method in CHUNKED_ANCHORS}


def monitored(rank: int, world: int) -> dict[str, Any]:
    """What is measured at the end of an epoch, on fewer images of one set than there are processes."""
    random = torch.Generator().manual_seed(5)
    pixels = torch.randint(0, 200, (60, 3, 8, 8), generator=random, dtype=torch.uint8)
    labels = torch.arange(60) % 3
    pixels[:, 0] += 8 * labels[:, None, None].byte()
    train, test, few = (ImageStore(pixels[a:b], labels[a:b]) for a, b in ((0, 31), (31, 60), (0, 1)))
    torch.manual_seed(0)
    encoder = Encoder()
    encoder[1].running_mean += rank  # batch norm that was not joined
    probe = OnlineProbe(10, 3)
    probe.weight.copy_(torch.randn(3, 10, generator=random))
    module: Any = SimpleNamespace(
        config=SimpleNamespace(monitor=MonitorConfig(linear=True)),
        networks=SimpleNamespace(encoder=encoder),
        views=Views(ViewsConfig(), 8, (0.5,) * 3, (0.2,) * 3),
        probe=probe,
    )
    one = gather_rows(own_features(encoder, few, module.views, torch.arange(1)))
    scores = online_scores(module, ImageDataset("some", train, test, ("a", "b", "c")))
    features, mine = torch.arange(2.0 * BATCH * 3).view(2, BATCH, 3), rank_slice(BATCH, rank, world)
    outputs = StepOutputs(features[:, mine].flatten(0, 1), torch.zeros(2, BATCH, 4), torch.zeros(0), torch.zeros(0))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(health, "SAMPLED", 3)
        return {"one": one, "scores": scores, "health": sampled_features(outputs), "signals": signals(rank, world)}


def signals(rank: int, world: int) -> list[int]:
    """What a process learns of signals, where the last one of them receives one before its second step."""
    largest = LargestOfRanks()
    return [largest(SIGUSR1 if step and rank == world - 1 else 0, torch.device("cpu")) for step in range(4)]


def worker(rank: Any, port: Any, folder: Any, world: Any) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world)
    torch.save(everything(rank, world) | {"monitored": monitored(rank, world)}, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def free_port() -> Any:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def processes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What each of several processes saw, for every method."""
    folder = tmp_path_factory.mktemp("ranks")
    mp.spawn(worker, (free_port(), str(folder), request.param), nprocs=request.param)
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(request.param)]


@pytest.fixture(scope="module")
def one_process() -> Any:
    return everything(0, 1)


@pytest.mark.parametrize("method", [*SPECS, *(f"{method} in chunks" for method in CHUNKED_ANCHORS)])
def test_several_processes_equal_one(processes: Any, one_process: Any, method: str) -> None:
    one = one_process[method]
    ranks = [rank[method] for rank in processes]
    for step in range(STEPS):
        for rank in ranks:
            assert torch.allclose(rank[step]["loss"], one[step]["loss"], 0, 1e-10)
            for part in ("gradients", "state"):
                assert rank[step][part].keys() == one[step][part].keys()
                for name, value in one[step][part].items():
                    assert torch.allclose(rank[step][part][name], value, 1e-9, 1e-10), (part, name)
        for name in ("bank.rows", "bank.ids"):
            first, *others = (rank[step]["state"][name] for rank in ranks)
            assert all(torch.equal(first, other) for other in others), "banks differ between ranks"


def test_scores_and_health_are_those_of_one_process(processes: Any) -> None:
    """Features are shared out, and so are the queries; batch norm has rank 0's statistics everywhere."""
    one = monitored(0, 1)
    assert one["scores"].keys() == {"knn", "linear"}
    assert 40 < one["scores"]["knn"] < 100
    assert torch.equal(one["health"], torch.arange(2.0 * BATCH * 3).view(2, BATCH, 3)[:, ::3].flatten(0, 1))
    for rank in processes:
        assert rank["monitored"]["scores"] == one["scores"]
        torch.testing.assert_close(rank["monitored"]["one"], one["one"])
        assert torch.equal(rank["monitored"]["health"], one["health"])


def test_a_signal_to_one_process_ends_all_with_its_code_after_the_same_step(processes: Any) -> None:
    assert [rank["monitored"]["signals"] for rank in processes] == len(processes) * [[0, 0, SIGUSR1, SIGUSR1]]
    assert signals(0, 1) == [0, SIGUSR1, SIGUSR1, SIGUSR1]


CHUNKED = ("simclr", "byol", "vicreg")


def chunked(method: Any, rank: Any, world: Any, order: Any, chunk: Any) -> Any:
    """Loss, gradients and statistics of one step in chunks."""
    step = Step(method).double()
    if world > 1:
        sync_batchnorm(step.networks, torch.device("cpu"))
    wrapped = DistributedDataParallel(step) if world > 1 else step
    views = torch.randn(2, BATCH, 3, 6, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    mine = torch.tensor(order)[rank_slice(BATCH, rank, world)]
    loss, _, _ = wrapped(views[:, mine], mine, None, chunk)
    loss.backward()
    gradients = {n: p.grad for n, p in step.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **gradients, **dict(step.networks.named_buffers())}


def chunk_worker(rank: Any, port: Any, folder: Any) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    torch.save({method: chunked(method, rank, 2, range(BATCH), 2) for method in CHUNKED}, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.slow
def test_chunks_of_two_processes_equal_joined_chunks_of_one(tmp_path: Path) -> None:
    """Gradient caching under DDP: batch norm sees the same chunk of both processes, the loss the whole batch."""
    mp.spawn(chunk_worker, (free_port(), str(tmp_path)), nprocs=2)
    ranks = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2)]
    for method in CHUNKED:
        one = chunked(method, 0, 1, (0, 1, 4, 5, 2, 3, 6, 7), 4)
        for rank in ranks:
            torch.testing.assert_close(rank[method], one, rtol=1e-9, atol=1e-10)


def one_hot_worker(rank: Any, port: Any, folder: Any) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=2)
    local = nn.functional.one_hot(torch.arange(3) + 3 * rank, 6).double().requires_grad_()
    joined = gather(torch.stack([local, local]), dim=1)
    weights = torch.arange(1.0, 13).view(2, 6, 1).double()
    (joined * weights).sum().backward()
    torch.save([joined.detach(), local.grad], f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def test_gather_joins_in_order_and_sums_gradients(tmp_path: Path) -> None:
    """Every anchor's positive stays beside it, views do not interleave, the backward sums over ranks."""
    mp.spawn(one_hot_worker, (free_port(), str(tmp_path)), nprocs=2)
    for rank in range(2):
        joined, gradient = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        assert torch.equal(joined[0], torch.eye(6).double())
        assert torch.equal(joined[1], torch.eye(6).double())
        own = torch.arange(1.0, 13).view(2, 6)[:, 3 * rank : 3 * rank + 3].sum(0)
        assert torch.equal(gradient, 2 * own[:, None].expand(3, 6).double())


def test_joined_batch_norm_alone_is_batch_norm() -> None:
    plain = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(64, 5), nn.BatchNorm1d(5))
    inputs = torch.randn(6, 3, 6, 6)
    joined = sync_batchnorm(deepcopy(plain), torch.device("cpu"))
    assert torch.equal(plain(inputs), joined(inputs))
    assert plain.state_dict().keys() == joined.state_dict().keys()
    assert all(
        torch.equal(a, b) for a, b in zip(plain.state_dict().values(), joined.state_dict().values(), strict=True)
    )


@pytest.mark.slow
def test_the_command_line_trains_on_two_devices(tmp_path: Path, small_arguments: list[str]) -> None:
    """devices=2 gives what devices=1 gives, up to the rounding of the views, with the same learning rates."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    for devices in (1, 2):
        subprocess.run(
            [sys.executable, "-m", "psm", "pretrain", *small_arguments, f"out={tmp_path / str(devices)}", "epochs=1",
             f"devices={devices}", "accelerator=cpu", "precision=64-true", "optim.lr=0.01",
             "monitor.linear=true"],
            check=True, env=environment, capture_output=True, timeout=300,
        )  # fmt: skip
    one, two = (load_file(tmp_path / devices / "encoder.safetensors") for devices in ("1", "2"))
    assert one.keys() == two.keys()
    for name in one:
        assert torch.allclose(one[name].double(), two[name].double(), 1e-3, 1e-4), name
    (a,), (b,) = (read_lines(tmp_path / devices / "metrics.jsonl") for devices in ("1", "2"))
    assert a["lr"] == b["lr"]
    assert a["loss"] == pytest.approx(b["loss"], abs=1e-4)
    states = [read_checkpoint(tmp_path / d / "checkpoints" / "last.ckpt")["state_dict"] for d in ("1", "2")]
    assert torch.equal(states[0]["bank.ids"], states[1]["bank.ids"])
    assert torch.allclose(states[0]["bank.rows"], states[1]["bank.rows"], 0, 1e-4)
    assert states[0]["probe.weight"].any()  # the online probe too learns from the images of both
    assert torch.allclose(states[0]["probe.weight"], states[1]["probe.weight"], 0, 1e-4)
