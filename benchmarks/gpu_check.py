"""Check on a GPU what can only be tested there, and print the figures.

    python benchmarks/gpu_check.py                 # on the first GPU; without one a dry run on the CPU
    python benchmarks/gpu_check.py --encoder tiny --batch 32 --bank 512 --steps 3     # the dry run, made small

Each line is a check with what was measured: values against the CPU's, kernels that a step really launches, its parts'
times, its memory, and whether it can be compiled and captured as a CUDA graph. Ends with code 1 if a check failed.
"""

import argparse
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from psm.config.schema import OptimConfig, ViewsConfig
from psm.losses.contrastive import LossOutput
from psm.losses.method_loss import method_loss
from psm.methods import get_method
from psm.mining.draws import KeyedDraws, draw_keys
from psm.mining.memory_bank import MemoryBank
from psm.models.factory import create_encoder, prefers_channels_last
from psm.models.heads import prediction_head, projection_head
from psm.models.outputs import Embeddings
from psm.models.siamese import SiameseNetworks
from psm.training.health import feature_health
from psm.training.optim import build_optimizer
from psm.utils.devices import find_precision
from psm.views.transform import Views

SIZE = 32


class Step:
    """PSM's step on a device, in parts that can be timed, with everything drawn from fixed seeds."""

    def __init__(self, device: torch.device, arguments: argparse.Namespace):
        self.device, self.batch = device, arguments.batch
        self.spec = get_method("psm")
        torch.manual_seed(0)
        encoder = create_encoder(arguments.encoder, "cifar", SIZE)
        networks = SiameseNetworks(encoder, projection_head(encoder.width), prediction_head())
        self.networks = networks.to(device)
        if prefers_channels_last(device):
            self.networks.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.bank = MemoryBank(arguments.bank, 128)
        self.bank.enqueue(numbers(arguments.bank, 128), torch.arange(arguments.bank) + self.batch)
        self.bank.to(device)
        self.optimizer = build_optimizer(
            [p for p in self.networks.parameters() if p.requires_grad], OptimConfig(lr=0.06, weight_decay=5e-4)
        )
        self.views = Views(ViewsConfig(), SIZE, (0.5,) * 3, (0.2,) * 3)
        self.images = torch.randint(0, 256, (self.batch, 3, SIZE, SIZE), dtype=torch.uint8, generator=seeded()).to(
            device
        )
        self.ids = torch.arange(self.batch, device=device)
        self.keys = draw_keys(self.batch, seeded()).to(device)

    def make_views(self) -> Tensor:
        return self.views.apply(self.images, self.views.sample_params(self.batch, seeded()), channels_last=True)

    def embed(self, views: Tensor) -> Embeddings:
        bf16 = find_precision(self.device.type) == "bf16-mixed"
        # Without its cache of weights, which would outlive the graph that a step is captured in.
        with torch.autocast(self.device.type, torch.bfloat16, enabled=bf16, cache_enabled=False):
            return self.networks(views)[0]

    def loss(self, embeddings: Embeddings, function: Callable[..., LossOutput] = method_loss) -> Tensor:
        draws = KeyedDraws(self.keys)
        return function(embeddings, self.spec.criterion, self.bank, self.ids, draws, **self.spec.loss_options).loss

    def until_update(self, packed: Tensor) -> Tensor:
        """Views by packed parameters, networks, loss and backward pass: what a CUDA graph may hold."""
        loss = self.loss(self.embed(self.views.apply_at_once(self.images, packed, channels_last=True)))
        loss.backward()
        return loss.detach()

    def update(self, keys: Tensor) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.networks.update_target(self.spec.target.momentum)
        self.bank.enqueue(keys, self.ids)

    def __call__(self) -> None:
        embeddings = self.embed(self.make_views())
        self.loss(embeddings).backward()
        self.update(self.spec.bank_keys(embeddings.key))


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, generator=seeded())


def finish(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def fixed_embeddings(step: Step) -> Embeddings:
    """The same leaves on every device."""
    parts = numbers(3, 2, step.batch, 128).to(step.device)
    return Embeddings(parts[0].requires_grad_(), parts[1].requires_grad_(), parts[2])


def check_views(step: Step, reference: Step) -> tuple[bool, str]:
    params = reference.views.sample_params(step.batch, seeded())
    packed = step.views.pack(params, step.images)
    gap = (step.views.apply_at_once(step.images, packed).cpu() - reference.make_views()).abs().max().item()
    return gap < 1e-3, f"largest difference from the CPU's {gap:.1e}"


def check_search(step: Step, reference: Step) -> tuple[bool, str]:
    vectors = numbers(step.batch, 128)
    found, expected = (s.bank.search(vectors.to(s.device), 5, s.ids) for s in (step, reference))
    gap = (found.similarity.cpu() - expected.similarity).abs().max().item()
    share = (found.ids.cpu() == expected.ids).float().mean().item()
    return gap < 1e-2 and share > 0.98, f"{share:.2%} of the rows are the CPU's, similarities differ by {gap:.1e}"


def gpu_loss(device: torch.device) -> Callable[..., LossOutput]:
    """The loss as a GPU computes it, also on a CPU, where a traced one takes the same operations and draws."""
    return method_loss if device.type == "cuda" else torch.compile(method_loss, backend="eager", fullgraph=True)


def check_loss(step: Step, reference: Step) -> tuple[bool, str]:
    losses, gradients = [], []
    for each in (step, reference):
        embeddings = fixed_embeddings(each)
        loss = each.loss(embeddings, gpu_loss(each.device))
        losses.append(loss.item())
        gradients.append(torch.autograd.grad(loss, embeddings.query)[0].cpu())
    gap = (gradients[0] - gradients[1]).norm().item() / gradients[1].norm().item()
    good = abs(losses[0] - losses[1]) < 1e-2 and gap < 5e-2  # TF32 may be on, and a draw may fall the other way
    return good, f"{losses[0]:.5f}, on the CPU {losses[1]:.5f}; gradients differ by {gap:.1e}"


def check_health(step: Step, reference: Step) -> tuple[bool, str]:
    features, projection = numbers(4096, 512), numbers(2, 2048, 128)
    on_device, on_cpu = (feature_health(features.to(s.device), projection.to(s.device)) for s in (step, reference))
    gap = max(abs(on_device[name] - on_cpu[name]) for name in on_cpu)
    return gap < 1e-6, f"largest difference from the CPU's {gap:.1e}"


def check_compiled(step: Step, reference: Step) -> tuple[bool, str]:
    """By inductor on a GPU; a dry run differentiates ahead of time, which takes seconds."""
    backend = "inductor" if step.device.type == "cuda" else "aot_eager"
    loss = step.loss(fixed_embeddings(step), torch.compile(method_loss, backend=backend, fullgraph=True))
    expected = reference.loss(fixed_embeddings(reference), gpu_loss(reference.device))
    gap = abs(loss.item() - expected.item())
    return gap < 1e-2, f"one graph by {backend}; differs from the CPU's by {gap:.1e}"


def captured(function: Callable[[], Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    """A CUDA graph of a function, and the tensor that each replay writes its result to."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = function()
    return graph, result


def check_graph(step: Step, reference: Step) -> tuple[bool, str]:
    if step.device.type != "cuda":
        return True, "skipped: no GPU"
    embeddings = fixed_embeddings(step)

    def compute() -> Tensor:
        loss = step.loss(embeddings)
        torch.autograd.grad(loss, embeddings.query)
        return loss.detach()

    graph, loss = captured(compute)
    graph.replay()
    gap = abs(loss.item() - step.loss(embeddings).item())
    return gap < 1e-4, f"the loss was captured; replayed it differs by {gap:.1e}"


def check_step_graph(step: Step, reference: Step) -> tuple[bool, str]:
    packed = step.views.pack(step.views.sample_params(step.batch, seeded()), step.images)
    expected = step.until_update(packed).item()
    step.optimizer.zero_grad()
    if step.device.type != "cuda":
        return True, "skipped: no GPU"
    graph, loss = captured(lambda: step.until_update(packed))
    graph.replay()
    gap = abs(loss.item() - expected)
    step.optimizer.zero_grad()
    return gap < 1e-2, f"views, networks, loss and backward were captured; the loss differs by {gap:.1e}"


def check_kernels(step: Step, reference: Step) -> tuple[bool, str]:
    if step.device.type != "cuda":
        return True, "skipped: no GPU (benchmarks/kernels.py counts on the meta device)"
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        finish(step.device)
    launched = sum(event.count for event in profile.key_averages())
    return True, f"{launched} kernels and copies in a step"


CHECKS: dict[str, Callable[[Step, Step], tuple[bool, str]]] = {
    "views": check_views,
    "search": check_search,
    "loss": check_loss,
    "compiled loss": check_compiled,
    "health": check_health,
    "CUDA graph of the loss": check_graph,
    "CUDA graph of the step": check_step_graph,
    "kernels": check_kernels,
}


def run_check(check: Callable[[Step, Step], tuple[bool, str]], step: Step, reference: Step) -> tuple[bool, str]:
    """A check that raises has failed; the others go on."""
    try:
        return check(step, reference)
    except Exception as error:
        return False, f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def timed(step: Step, function: Callable[[], Any], repeats: int) -> str:
    """Median milliseconds, and the smallest and largest."""
    taken = []
    for _ in range(repeats + 2):  # the first two warm up
        finish(step.device)
        start = time.perf_counter()
        function()
        finish(step.device)
        taken.append(1000 * (time.perf_counter() - start))
    taken = sorted(taken[2:])
    return f"{taken[len(taken) // 2]:.2f} ({taken[0]:.2f} – {taken[-1]:.2f}) ms"


def figures(step: Step, repeats: int) -> None:
    """Times of the parts of a step, and its memory."""
    views = step.make_views()
    embeddings = fixed_embeddings(step)
    print(f"views     {timed(step, step.make_views, repeats)}")
    print(f"networks  {timed(step, lambda: step.embed(views).query.float().sum().backward(), repeats)}")
    print(f"loss      {timed(step, lambda: torch.autograd.grad(step.loss(embeddings), embeddings.query), repeats)}")
    step.optimizer.zero_grad()
    if step.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    print(f"step      {timed(step, step, repeats)}")
    if step.device.type == "cuda":
        print(f"memory    {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB at most")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--encoder", default="resnet18")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--bank", type=int, default=16384, help="rows")
    parser.add_argument("--steps", type=int, default=20, help="repeats of each timing")
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU: a dry run, it checks the script"
    print(f"torch {torch.__version__} on {name}; precision {find_precision(device.type)}")
    torch.backends.cudnn.benchmark = True
    step, reference = Step(device, arguments), Step(torch.device("cpu"), arguments)
    failed = 0
    for title, check in CHECKS.items():
        good, words = run_check(check, step, reference)
        failed += not good
        print(f"{'ok    ' if good else 'FAILED'} {title}: {words}")
    figures(step, arguments.steps)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
