"""The cost model on GPUs: collectives of a simulated rank, and published figures of the hardware as assumptions."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from psm.models.factory import create_encoder
from psm.models.heads import prediction_head, projection_head
from simulated_rank import WIDTH, Shape, Traffic

VIEWS, DIRECTIONS, SIZE, NODE = 2, 2, 224, 8
BATCH, IMAGENET, WEB = 4096, 1_281_167, 100_000_000

# Name: value, unit, where it comes from. None of them was measured by this project.
ASSUMED: dict[str, tuple[float, str, str]] = {
    "training of ResNet-50 on one GPU": (
        2470, "images/s", "published: NVIDIA DeepLearningExamples, A100 80 GB, mixed precision",
    ),
    "forward pass, of forward and backward": (1 / 3, "", "usual count of operations"),
    "memory bandwidth of a GPU": (2.0e12, "bytes/s", "data sheet: A100 80 GB"),
    "products in TF32, half of the peak": (78e12, "FLOP/s", "data sheet: A100, 156 TFLOP/s; half is a guess"),
    "bus bandwidth of an all-reduce between nodes": (
        85e9, "bytes/s", "a user's nccl-tests, 3 nodes of 8 A100 with 4 HDR cards each (NVIDIA/nccl-tests issue 119)",
    ),
    "a small collective between nodes": (
        40e-6, "s", "guess: twice the 20 us of two A100 on two nodes (NVIDIA/nccl-tests issue 150)",
    ),
    "a small collective within a node": (15e-6, "s", "guess"),
    "bus bandwidth within a node": (230e9, "bytes/s", "guess: below NVLink's 300 GB/s each way"),
    "passes over a view's pixels": (30, "", "guess, by the kernels of the views"),
    "passes over the loss's pairs": (30, "", "guess, by the kernels of the loss"),
    "cores of a node": (128, "", "data sheet: DGX A100, two EPYC 7742; a core as fast as one here"),
    "a file of ImageNet": (110e3, "bytes", "published size of the set over its number of images"),
}  # fmt: skip


def value(name: str) -> float:
    return ASSUMED[name][0]


@dataclass(frozen=True)
class Scenario:
    """A run on paper."""

    title: str
    gpus: int
    images: int
    bank: int
    sharded: bool = False
    remote: bool = False  # shards that every node copies


SCENARIOS = (
    Scenario("ImageNet-1k, one node", 8, IMAGENET, 65_536),
    Scenario("ImageNet-1k", 64, IMAGENET, 65_536),
    Scenario("ImageNet-1k, every image in the bank", 64, IMAGENET, IMAGENET, sharded=True),
    Scenario("100 million images on a server", 64, WEB, 65_536, remote=True),
    Scenario("100 million images, 10 million in the bank", 64, WEB, 10_000_000, sharded=True, remote=True),
)


@dataclass(frozen=True)
class Networks:
    """What the collectives of ResNet-50 with its heads depend on."""

    weights: int  # bytes
    online_norms: int
    target_norms: int

    @classmethod
    def of(cls, encoder: str) -> "Networks":
        with torch.device("meta"):
            trunk = create_encoder(encoder, image_size=SIZE)
            common = nn.ModuleList([trunk, projection_head(trunk.width)])
            predictor = prediction_head()
        target, own = (_norms(part) for part in (common, predictor))
        weights = sum(p.numel() * 4 for part in (common, predictor) for p in part.parameters())
        return cls(weights, target + own, target)


def _norms(module: nn.Module) -> int:
    return sum(isinstance(layer, nn.modules.batchnorm._BatchNorm) for layer in module.modules())


def step_parts(scenario: Scenario, networks: Networks, traffic: Traffic) -> dict[str, float]:
    """Seconds of the parts of a step on one GPU."""
    gpus, own = scenario.gpus, BATCH // scenario.gpus
    place = "within a node" if gpus <= NODE else "between nodes"
    latency = value(f"a small collective {place}")
    bandwidth = value("bus bandwidth within a node" if gpus <= NODE else "bus bandwidth of an all-reduce between nodes")
    memory = value("memory bandwidth of a GPU")
    forward = value("forward pass, of forward and backward")
    trained = own * VIEWS / value("training of ResNet-50 on one GPU")

    def reduced(calls: int, size: float) -> float:
        return calls * latency + 2 * (gpus - 1) / gpus * size / bandwidth

    exchanged = 0.0
    for purpose, calls in traffic.calls.items():
        size = traffic.bytes[purpose]
        if purpose == "gather":
            exchanged += calls * latency + (gpus - 1) * size / bandwidth
        elif purpose != "batch norm":  # that of the simulated encoder; ResNet-50's is below
            exchanged += reduced(calls, size)
    queries, rows = (BATCH, scenario.bank / gpus) if scenario.sharded else (own, scenario.bank)
    products = 2 * queries * rows * WIDTH / value("products in TF32, half of the peak")
    touched = (4 * rows * WIDTH + 3 * 4 * queries * rows) / memory  # the rows, and similarities written, read twice
    gradients = reduced(1, networks.weights)
    return {
        "networks": trained * (1 + forward),
        "views": own * VIEWS * 3 * SIZE**2 * 4 * value("passes over a view's pixels") / memory,
        "batch norm, exchange": (2 * networks.online_norms + networks.target_norms) * latency,
        "gather": exchanged,
        "search": DIRECTIONS * max(products, touched),
        "loss": DIRECTIONS * own * 2 * BATCH * 4 * value("passes over the loss's pairs") / memory,
        "all-reduce beyond the backward pass": max(0.0, gradients - trained * (1 - forward)),
        "update": 10 * networks.weights / memory,
    }


def demands(scenario: Scenario, step: float, decode_ms: float, index_bytes: float) -> dict[str, float]:
    """What a node needs beside its GPUs."""
    own = BATCH / scenario.gpus * NODE
    file, row = value("a file of ImageNet"), 4 * WIDTH + 8
    return {
        "cores that decode": own * decode_ms / 1e3 / step,
        "GB/s read": (BATCH if scenario.remote else own) * file / step / 1e9,
        "GB of index": NODE * scenario.images * index_bytes / 1e9,
        "GB of bank a GPU": scenario.bank * row / (scenario.gpus if scenario.sharded else 1) / 1e9,
        "GB of bank in a checkpoint": scenario.bank * row / 1e9,
        "GB to write a checkpoint": NODE * scenario.bank * row / 1e9 if scenario.sharded else 0.0,
    }


def extrapolate(decode_ms: float, index_bytes: float, traffic_of: Callable[[Shape, int], Traffic]) -> dict[str, Any]:
    """The scenarios on paper, with what they assume."""
    networks = Networks.of("resnet50")
    rows, traffics = [], {}
    for scenario in SCENARIOS:
        key = (scenario.gpus, scenario.sharded)
        if key not in traffics:
            traffics[key] = traffic_of(Shape(BATCH, 65_536, sharded=scenario.sharded), scenario.gpus)
        parts = step_parts(scenario, networks, traffics[key])
        step = sum(parts.values())
        rows.append(
            {
                "scenario": scenario.title,
                "gpus": scenario.gpus,
                "bank": scenario.bank,
                "parts ms": {name: 1e3 * seconds for name, seconds in parts.items()},
                "step ms": 1e3 * step,
                "images a second": BATCH / step,
                "epoch minutes": scenario.images / BATCH * step / 60,
                "traffic": traffics[key].rows(),
                **demands(scenario, step, decode_ms, index_bytes),
            }
        )
        print(f"{scenario.title}, {scenario.gpus} GPUs: {1e3 * step:.0f} ms a step on paper")
    assumed = [{"of": name, "value": row[0], "unit": row[1], "source": row[2]} for name, row in ASSUMED.items()]
    return {"assumed": assumed, "networks": vars(networks), "paper": rows}
