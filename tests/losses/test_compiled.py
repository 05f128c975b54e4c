"""A compiled loss is the eager one, as one graph: compiled once while the bank fills, and once when it is full."""

import shutil
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

import psm.losses.chunked
from helpers import as_on_an_accelerator
from psm.losses.method_loss import COMPILES, method_loss
from psm.methods import METHODS, get_method
from psm.mining.draws import KeyedDraws, draw_keys
from psm.mining.memory_bank import MemoryBank
from psm.models.outputs import Embeddings

pytestmark = pytest.mark.skipif(not COMPILES, reason="this torch does not compile the loss, and runs leave it as it is")
COUNT, WIDTH, SIZE = 8, 16, 24
SMALL = {"mochi": {"negatives": {"num_hard": 4, "num_mix": 6, "num_mix_query": 2}}}


def steps(name: str, function: Callable[..., Any], number: int) -> list[list[torch.Tensor]]:
    """Loss, metrics and gradients of some steps, the bank filled in between: full after three."""
    spec = get_method(name, **SMALL.get(name, {}))
    bank, random = MemoryBank(SIZE, WIDTH), torch.Generator().manual_seed(0)
    found = []
    for step in range(number):
        z, q, k = torch.randn(3, 2, COUNT, WIDTH, generator=random).unbind()
        z.requires_grad_()
        query = q.requires_grad_() if spec.predictor.enabled else z
        key = k if spec.target.enabled else z
        ids = torch.arange(COUNT) + 5 * step
        negatives, positives = (KeyedDraws(draw_keys(COUNT, random)) for _ in range(2))
        loss, metrics = function(
            Embeddings(z, query, key), spec.criterion, bank, ids, negatives, positive_generator=positives,
            **spec.loss_options,
        )  # fmt: skip
        gradients = torch.autograd.grad(loss, [z, query], allow_unused=True)
        found.append([loss.detach(), *metrics.values(), *(x for x in gradients if x is not None)])
        bank.enqueue(spec.bank_keys(key), ids)
    return found


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, int], Any]:
    def computed(name: str, number: int) -> Any:
        with monkeypatch.context() as patched:
            as_on_an_accelerator(patched)
            return steps(name, method_loss, number)

    return computed


@pytest.mark.parametrize(
    "name",
    [
        *("psm", "simclr", "mocov2", "hcl", "byol", "vicreg", "nnclr", "snclr"),
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("dcl", "bcl", "mochi", "psmv2")),
    ],
)
def test_the_loss_is_one_graph_whatever_the_bank_holds(name: str, eager: Any) -> None:
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    torch.compiler.reset()
    found = steps(name, torch.compile(method_loss, backend=backend, fullgraph=True), 5)
    assert len(graphs) == (2 if get_method(name).needs_bank else 1)
    torch.testing.assert_close(found, eager(name, 5))


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a compiler")
@pytest.mark.parametrize(
    "name",
    [*("simclr", "psm"), *(pytest.param(x, marks=pytest.mark.slow) for x in METHODS if x not in ("simclr", "psm"))],
)
def test_inductor_computes_the_same_loss(name: str, eager: Any) -> None:
    """Of an empty bank, and not further: its kernels are what takes time to compile."""
    torch.compiler.reset()
    found = steps(name, torch.compile(method_loss, backend="inductor", fullgraph=True), 2)
    torch.testing.assert_close(found, eager(name, 2), rtol=1e-4, atol=1e-5)


def test_a_compiled_loss_in_chunks_leaves_them_eager(eager: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psm.losses.chunked, "PAIRS", 300)
    torch.compiler.reset()
    found = steps("psm", torch.compile(method_loss, backend="eager"), 2)
    torch.testing.assert_close(found, eager("psm", 2))


def test_nothing_imports_the_compiler_before_it_is_used() -> None:
    code = "import sys, psm.losses.method_loss, psm.ops; sys.exit('torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
