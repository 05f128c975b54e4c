"""Kernels that a training step launches on an accelerator, counted on torch's meta device, which needs none.

    python benchmarks/kernels.py            # the table
    python benchmarks/kernels.py --ops loss # which operations a part consists of

Counted is every operation that reaches the device and computes something: not views of tensors and not memory that is
only allocated. A convolution's backward counts once, an operation over a list of tensors (foreach) too. These are the
eager kernels. The second table has the graphs that torch.compile makes of each part: one, if nothing breaks it.
"""

import argparse
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from psm.config.schema import OptimConfig, ViewsConfig
from psm.losses.method_loss import method_loss
from psm.methods import get_method
from psm.methods.registry import METHODS
from psm.mining.draws import KeyedDraws, draw_keys
from psm.mining.memory_bank import MemoryBank
from psm.models.factory import create_encoder
from psm.models.heads import prediction_head, projection_head
from psm.models.outputs import Embeddings
from psm.models.siamese import SiameseNetworks
from psm.training.optim import build_optimizer
from psm.training.run_module import RunningMean
from psm.views.transform import Views

META = torch.device("meta")
# Give a view of their argument, or memory without writing it.
FREE = (
    "empty",
    "new_empty",
    "detach",
    "alias",
    "view",
    "_unsafe_view",
    "unsafe_split",
    "_reshape_alias",
    "lift_fresh",
    "set_",
)
PARTS = ("views", "networks", "loss", "update")
COMPILED = PARTS[:3]


class KernelCount(TorchDispatchMode):
    """Counts the kernels of the operations within it, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        name = function.overloadpacket.__name__
        tensors = (x for x in tree_leaves((result, args)) if isinstance(x, Tensor))
        on_device = any(x.device == META for x in tensors)
        if on_device and not function.is_view and not name.startswith(FREE):
            self.names[name] += 1
        return result


@dataclass
class StepKernels:
    """Kernels of one step by part."""

    parts: dict[str, Counter[str]] = field(default_factory=lambda: {part: Counter() for part in PARTS})

    @contextmanager
    def counting(self, part: str) -> Iterator[None]:
        with KernelCount() as counted:
            yield
        self.parts[part] += counted.names

    @property
    def counts(self) -> dict[str, int]:
        return {part: names.total() for part, names in self.parts.items()}

    @property
    def total(self) -> int:
        return sum(self.counts.values())


class GraphCount:
    """Counts the graphs that torch.compile makes of each part; they run as they are."""

    def __init__(self) -> None:
        self.parts: Counter[str] = Counter()

    def backend(self, part: str) -> Callable[..., Any]:
        def count(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
            self.parts[part] += 1
            return graph.forward

        return count


def build_step(
    method: str,
    batch: int = 256,
    bank_rows: int = 16384,
    encoder: str = "resnet18",
    size: int = 32,
    graphs: GraphCount | None = None,
) -> Callable[[], StepKernels]:
    """A step of a method on the meta device, which tells what it launched; compiled, if graphs are to be counted."""
    spec = get_method(method)
    with META:
        backbone = create_encoder(encoder, "cifar", size)
        head = prediction_head() if spec.predictor.enabled else None
        networks = SiameseNetworks(backbone, projection_head(backbone.width), head, spec.target.enabled)
        bank = MemoryBank(bank_rows, 128)
        bank.enqueue(torch.empty(bank_rows, 128), torch.arange(bank_rows))
        meter = RunningMean(("loss", *spec.metric_names))
        images = torch.zeros(batch, 3, size, size, dtype=torch.uint8)
        ids = torch.arange(batch)
    optimizer = build_optimizer(
        [p for p in networks.parameters() if p.requires_grad], OptimConfig(lr=0.06, weight_decay=5e-4)
    )
    views = Views(ViewsConfig(), size, (0.5,) * 3, (0.2,) * 3)
    make_views, compute_loss = views.apply_at_once, method_loss
    if graphs is not None:
        torch.compiler.reset()
        networks.compile_parts(graphs.backend("networks"))
        make_views = torch.compile(make_views, backend=graphs.backend("views"))
        compute_loss = torch.compile(compute_loss, backend=graphs.backend("loss"))

    def step() -> StepKernels:
        kernels = StepKernels()
        # Nothing is compiled while kernels are counted.
        counting = kernels.counting if graphs is None else nullcontext
        with counting("views"):
            params = views.sample_params(batch, torch.Generator().manual_seed(0))
            given = make_views(images, views.pack(params, images), channels_last=True)
        with counting("networks"):
            embeddings, _ = networks(given)
        unique = {id(x): x.detach().requires_grad_(x.requires_grad) for x in embeddings}
        leaves = Embeddings(*(unique[id(x)] for x in embeddings))
        with counting("loss"):
            draws = KeyedDraws(draw_keys(batch, torch.Generator()).to(META))
            loss, metrics = compute_loss(leaves, spec.criterion, bank, ids, draws, **spec.loss_options)
            loss.backward()
        with counting("networks"):
            learned = {id(x): x for x in embeddings if x.requires_grad and unique[id(x)].grad is not None}
            torch.autograd.backward(list(learned.values()), [unique[name].grad for name in learned])
        with counting("update"):
            optimizer.step()
            optimizer.zero_grad()
            networks.update_target(spec.target.momentum)
            bank.enqueue(spec.bank_keys(embeddings.key), ids)
            meter.update({"loss": loss.detach(), **metrics})
        return kernels

    step()  # constants are copied once
    return step


def count(method: str, **settings: Any) -> StepKernels:
    """Kernels of a step, after the first."""
    return build_step(method, **settings)()


def count_graphs(method: str, **settings: Any) -> Counter[str]:
    """Graphs of two steps that are compiled."""
    graphs = GraphCount()
    build_step(method, **settings, graphs=graphs)()
    return graphs.parts


ROWS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("psm", {}),
    ("simclr", {}),
    ("mocov2", {}),
    ("byol", {}),
    ("psm", {"batch": 4096, "bank_rows": 2**20}),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ops", choices=PARTS, help="list the operations of a part of PSM's step")
    arguments = parser.parse_args()
    if arguments.ops:
        for name, number in count("psm").parts[arguments.ops].most_common():
            print(f"{number:5d}  {name}")
        return
    print(f"| method | batch | bank | {' | '.join(PARTS)} | all |")
    print("| --- " * (len(PARTS) + 4) + "|")
    for method, settings in ROWS:
        kernels = count(method, **settings)
        batch, bank = settings.get("batch", 256), settings.get("bank_rows", 16384)
        print(
            f"| {method} | {batch:,} | {bank:,} | {' | '.join(map(str, kernels.counts.values()))} | {kernels.total} |"
        )
    print(f"\n| graphs when compiled | {' | '.join(COMPILED)} |")
    print("| --- " * (len(COMPILED) + 1) + "|")
    for method in METHODS:
        graphs = count_graphs(method, batch=16, encoder="tiny")
        print(f"| {method} | {' | '.join(str(graphs[part]) for part in COMPILED)} |")


if __name__ == "__main__":
    main()
