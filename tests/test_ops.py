"""Each operation's kernel equals its plain definition; kernels load lazily and can be switched off."""

import os
import pickle
import subprocess
import sys
from contextlib import nullcontext
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch.nn.functional import normalize

from helpers import compiled
from psm import kernels, ops
from psm.models import factory
from psm.models.heads import prediction_head, projection_head
from psm.models.siamese import SiameseNetworks


def unit(*shape: Any, seed: Any = 0) -> Any:
    return normalize(torch.randn(shape, generator=torch.Generator().manual_seed(seed)), dim=1)


def python(code: Any, *arguments: Any, **environment: Any) -> Any:
    """What a new Python process prints, its environment changed."""
    result = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | environment,
    )
    return result.stdout.strip()


@compiled
def test_topk_similarity_equals_its_definition() -> None:
    queries, rows = unit(256, 32, seed=1), unit(3000, 32)
    given = (queries, rows, 5, torch.arange(3000) % 400, torch.arange(256))
    assert ops.has_kernel(ops.topk_similarity, *given)
    values, indices = ops.topk_similarity(*given)
    with kernels.disabled():
        plain_values, plain_indices = ops.topk_similarity(*given)
    torch.testing.assert_close(values, plain_values, atol=1e-6, rtol=0)
    assert (indices == plain_indices).float().mean() > 0.999  # but for ties to rounding


@compiled
def test_logsumexp_similarity_equals_its_definition_in_value_and_gradient() -> None:
    rows, results = unit(3000, 32), []
    queries = (unit(256, 32, seed=1) / 0.2).requires_grad_()
    assert ops.has_kernel(ops.logsumexp_similarity, queries, rows)
    for mode in (nullcontext, kernels.disabled):
        with mode():
            result = ops.logsumexp_similarity(queries, rows)
            results.append((result.detach(), *torch.autograd.grad(result.square().sum(), queries)))
    torch.testing.assert_close(*results, atol=1e-4, rtol=1e-5)


@compiled
@pytest.mark.parametrize("normalized", [True, False])
def test_crop_color_equals_its_definition(normalized: Any) -> None:
    random = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (20, 3, 24, 40), dtype=torch.uint8, generator=random)
    boxes = [torch.full((2, 20), float(x)) for x in (3, 5, 17, 30)]
    color = torch.eye(3) + 0.2 * torch.randn(2, 20, 3, 3, generator=random)
    flip, pivot = torch.rand(2, 20, generator=random) < 0.5, 0.3 * torch.randn(2, 20, generator=random)
    luma, mean, std = torch.tensor([[0.299, 0.587, 0.114], [0.5, 0.4, 0.3], [0.2, 0.3, 0.25]])
    views, plain = torch.empty(2, 2, 20, 3, 32, 32)
    given = (images, boxes, flip, color, pivot, luma, *((mean, std) if normalized else (None, None)))
    assert ops.has_kernel(ops.crop_color, *given, views)
    ops.crop_color(*given, views)
    with kernels.disabled():
        ops.crop_color(*given, plain)
    torch.testing.assert_close(views, plain, atol=2e-4, rtol=0)


@pytest.mark.parametrize("encoder", ["tiny", pytest.param("resnet50", marks=pytest.mark.slow)])
def test_an_accelerated_network_equals_the_plain_one_in_value_gradient_and_statistics(encoder: Any) -> None:
    torch.manual_seed(0)
    network, images = factory.create_encoder(encoder, "cifar", 16).double(), torch.randn(8, 3, 16, 16).double()
    results = []
    for mode in (ops.accelerated, lambda *_: nullcontext()):
        copy = deepcopy(network)
        with mode(copy, images.device):
            copy(images).square().sum().backward()
        results.append([*(p.grad for p in copy.parameters()), *copy.buffers()])
    torch.testing.assert_close(*results)


def test_acceleration_leaves_nothing_behind() -> None:
    """Modules, their types and attributes, state dict and pickle are those of before, within the context and after."""
    network, images = factory.create_encoder("tiny", "cifar", 32), torch.randn(4, 3, 32, 32)
    before = {name: (type(module), set(vars(module))) for name, module in network.named_modules()}
    keys = list(network.state_dict())
    with ops.accelerated(network, images.device):
        assert list(network.state_dict()) == keys
        copies = [deepcopy(network), pickle.loads(pickle.dumps(network))]
        network(images)
    after = {name: (type(module), set(vars(module))) for name, module in network.named_modules()}
    assert after == before
    network.eval()
    for copy in copies:
        copy.load_state_dict(network.state_dict())
        assert torch.equal(copy.eval()(images), network(images))
    assert len(pickle.dumps(network)) > 0


def test_acceleration_ends_with_an_error() -> None:
    network = factory.create_encoder("tiny", "cifar", 32)
    with pytest.raises(RuntimeError, match="channels"), ops.accelerated(network, torch.device("cpu")):
        network(torch.randn(2, 5, 32, 32))
    assert not any("forward" in vars(module) for module in network.modules())


def test_the_networks_of_training_are_accelerated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward passes of both networks, online and target, ask for it."""
    asked, real = [], ops.accelerated
    monkeypatch.setattr(ops, "accelerated", lambda module, device: asked.append(device.type) or real(module, device))
    encoder = factory.create_encoder("tiny", "cifar", 16)
    nets = SiameseNetworks(encoder, projection_head(encoder.width, 8, 4), prediction_head(4, 8, 4))
    nets(torch.randn(2, 4, 3, 16, 16))
    assert asked == ["cpu", "cpu"]


@pytest.mark.parametrize("switch", ["context", "environment"])
def test_switched_off_nothing_of_the_kernels_runs(monkeypatch: pytest.MonkeyPatch, switch: Any) -> None:
    def fail(*given: Any) -> None:
        raise AssertionError("a kernel was asked")

    for name in list(ops._definitions):
        monkeypatch.setitem(ops._kernels, name, ops.Kernel(fail, fail))
    monkeypatch.setattr(kernels.dispatch, "conv2d", fail)
    monkeypatch.setattr(kernels.dispatch, "basic_block_forward", fail)
    if switch == "environment":
        monkeypatch.setenv("PSM_KERNELS", "0")
    network = factory.create_encoder("tiny", "cifar", 32)
    with kernels.disabled() if switch == "context" else nullcontext():
        assert not ops.enabled()
        assert kernels.runtime.simd_width() is None
        assert kernels.status().startswith("off")
        assert not ops.keep_freed_memory()
        ops.topk_similarity(unit(256, 32), unit(3000, 32), 5)
        ops.logsumexp_similarity(unit(256, 32), unit(3000, 32))
        with ops.accelerated(network, torch.device("cpu")), kernels.optimize(network):
            network(torch.randn(2, 3, 32, 32))


def test_disabled_within_acceleration_and_nested() -> None:
    network, images = factory.create_encoder("tiny", "cifar", 32).eval(), torch.randn(64, 3, 32, 32)
    plain = network(images)
    with ops.accelerated(network, images.device), kernels.disabled():
        with kernels.disabled():
            pass
        assert not ops.enabled()
        assert torch.equal(network(images), plain)
    assert ops.enabled() or ops.disabled_by_environment()


CORE = "ops losses.contrastive losses.functional mining.memory_bank models.siamese views.transform training.module"


def test_the_core_imports_no_kernel() -> None:
    code = """
import importlib, sys
for module in sys.argv[1:]:
    importlib.import_module("psm." + module)
    print([module for name in sys.modules if name.startswith("psm.kernels")], end="")
"""
    assert python(code, *CORE.split()) == "[]" * len(CORE.split())


def test_kernels_load_with_the_first_operation_on_a_cpu() -> None:
    code = """
import sys, torch
from psm import ops
loaded = lambda: "psm.kernels" in sys.modules
meta, rows = torch.empty(4, 8, device="meta"), torch.zeros(4, 8)
ops.logsumexp_similarity(meta, meta)
before = loaded()
ops.logsumexp_similarity(rows, rows)
print(before, loaded())
"""
    assert python(code, PSM_KERNELS="") == "False True"
    assert python(code, PSM_KERNELS="0") == "False False"


def test_only_operations_can_be_registered() -> None:
    with pytest.raises(KeyError, match="topk_similarity"):
        ops.register("topk", lambda *given: True, lambda *given: None)


@pytest.mark.parametrize(
    ("native", "parallel", "capability", "expected"),
    [
        (True, 1, "AVX2", "avx2"),
        (True, 1, "AVX512", "avx512"),
        (None, 1, "AVX2", "PyTorch only, no compiled extension"),
        (True, 0, "AVX2", "PyTorch only, torch's OpenMP library was not found"),
        (True, 1, "DEFAULT", "PyTorch only, the CPU has no AVX2 (default)"),
    ],
)
def test_the_status_says_which_kernels_run_or_why_none(
    monkeypatch: pytest.MonkeyPatch, native: Any, parallel: Any, capability: Any, expected: Any
) -> None:
    monkeypatch.delenv("PSM_KERNELS", raising=False)
    monkeypatch.setattr(kernels.runtime, "_native", native)
    monkeypatch.setattr(kernels.runtime, "gomp_parallel", lambda: parallel)
    monkeypatch.setattr(kernels.runtime, "cpu_capability", lambda: capability)
    kernels.runtime.native_width.cache_clear()
    try:
        assert kernels.status() == expected
    finally:
        kernels.runtime.native_width.cache_clear()
