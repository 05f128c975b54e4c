"""Names, shapes and values of the networks; a slow forward pass is written out here with plain functions."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from psm.models.encoder import as_encoder
from psm.models.factory import create_encoder, prefers_channels_last
from psm.models.heads import prediction_head, projection_head
from psm.utils.errors import UserError

BATCH_NORM = {"weight", "bias", "running_mean", "running_var", "num_batches_tracked"}
RESNETS = {"resnet18": ([2, 2, 2, 2], 1), "resnet34": ([3, 4, 6, 3], 1), "resnet50": ([3, 4, 6, 3], 4)}


def expected_shapes(name: str) -> dict[str, tuple[int, ...]]:
    """torchvision's names and shapes without fc, written down from its published architecture."""
    depths, expansion = RESNETS[name]
    shapes: dict[str, tuple[int, ...]] = {"conv1.weight": (64, 3, 7, 7)}

    def batch_norm(prefix: str, channels: int) -> None:
        for part in BATCH_NORM:
            shapes[f"{prefix}.{part}"] = () if part == "num_batches_tracked" else (channels,)

    batch_norm("bn1", 64)
    before = 64
    for stage, depth in enumerate(depths, start=1):
        width = 64 * 2 ** (stage - 1)
        after = width * expansion
        for index in range(depth):
            prefix = f"layer{stage}.{index}"
            if expansion == 1:
                kernels = [(width, before, 3, 3), (width, width, 3, 3)]
            else:
                kernels = [(width, before, 1, 1), (width, width, 3, 3), (after, width, 1, 1)]
            for number, kernel in enumerate(kernels, start=1):
                shapes[f"{prefix}.conv{number}.weight"] = kernel
                batch_norm(f"{prefix}.bn{number}", kernel[0])
            if index == 0 and (stage > 1 or before != after):
                shapes[f"{prefix}.downsample.0.weight"] = (after, before, 1, 1)
                batch_norm(f"{prefix}.downsample.1", after)
            before = after
    return shapes


def parameters(module: nn.Module) -> int:
    return sum(tensor.numel() for tensor in module.parameters())


@pytest.mark.parametrize("name", RESNETS)
def test_state_dict_is_torchvisions(name):
    state = create_encoder(name, stem="imagenet").state_dict()
    assert {key: tuple(value.shape) for key, value in state.items()} == expected_shapes(name)


@pytest.mark.parametrize(
    ("name", "count", "width"),
    [("resnet18", 11_176_512, 512), ("resnet34", 21_284_672, 512), ("resnet50", 23_508_032, 2048)],
)
def test_parameter_counts_and_widths_are_the_published_ones(name, count, width):
    network = create_encoder(name, stem="imagenet")
    assert parameters(network) == count
    assert network.width == width
    state = network.state_dict()
    assert state["layer4.0.downsample.0.weight"].shape == (width, width // 2, 1, 1)


def test_tiny_has_about_a_million_parameters_and_halves_small_images():
    network = create_encoder("tiny")
    assert 1.1e6 < parameters(network) < 1.3e6
    assert network.width == 256
    assert network.conv1.weight.shape == (32, 3, 3, 3)
    assert network.conv1.stride == (2, 2)
    assert isinstance(network.maxpool, nn.Identity)
    assert create_encoder("tiny", stem="imagenet").conv1.weight.shape == (32, 3, 7, 7)


@pytest.mark.parametrize(("size", "kernel"), [(32, 3), (64, 3), (95, 3), (96, 7), (224, 7)])
def test_auto_takes_the_small_stem_below_96_pixels(size, kernel):
    network = create_encoder("resnet18", image_size=size)
    assert network.conv1.kernel_size == (kernel, kernel)
    assert network.conv1.stride == ((1, 1) if kernel == 3 else (2, 2))
    assert isinstance(network.maxpool, nn.Identity if kernel == 3 else nn.MaxPool2d)


def test_bottleneck_strides_in_its_3x3():
    block = create_encoder("resnet50").layer2[0]
    assert [block.conv1.stride, block.conv2.stride, block.conv3.stride] == [(1, 1), (2, 2), (1, 1)]


@pytest.mark.parametrize("stem", ["cifar", "imagenet"])
@pytest.mark.parametrize("name", ["tiny", "resnet18", "resnet50"])
def test_forward_equals_the_network_written_out(name, stem):
    torch.manual_seed(0)
    network = create_encoder(name, stem=stem).double().eval()
    for tensor in network.state_dict().values():  # batch norms that do something
        if tensor.ndim == 1:
            tensor.copy_(torch.rand_like(tensor) + 0.5)
    state = network.state_dict()
    images = torch.randn(2, 3, 40, 40, dtype=torch.float64)

    def norm(maps, prefix):
        mean, var, weight, bias = (
            state[f"{prefix}.{part}"][:, None, None] for part in ("running_mean", "running_var", "weight", "bias")
        )
        return (maps - mean) / (var + 1e-5).sqrt() * weight + bias

    def conv(maps, prefix, stride=1):
        weight = state[f"{prefix}.weight"]
        return functional.conv2d(maps, weight, stride=stride, padding=weight.shape[-1] // 2)

    maps = norm(conv(images, "conv1", 2 if stem == "imagenet" or name == "tiny" else 1), "bn1").relu()
    if stem == "imagenet":
        maps = functional.max_pool2d(maps, 3, 2, 1)
    convolutions, strided = (3, 2) if name == "resnet50" else (2, 1)
    for stage in range(1, 5):
        for index in range({"tiny": [1] * 4, "resnet18": [2] * 4, "resnet50": [3, 4, 6, 3]}[name][stage - 1]):
            prefix, stride = f"layer{stage}.{index}", 2 if stage > 1 and index == 0 else 1
            inner, past = maps, maps
            for number in range(1, convolutions + 1):
                inner = conv(inner, f"{prefix}.conv{number}", stride if number == strided else 1)
                inner = norm(inner, f"{prefix}.bn{number}")
                inner = inner.relu() if number < convolutions else inner
            if f"{prefix}.downsample.0.weight" in state:
                past = norm(conv(maps, f"{prefix}.downsample.0", stride), f"{prefix}.downsample.1")
            maps = (inner + past).relu()
    features = network(images)
    assert features.shape == (2, network.width)
    torch.testing.assert_close(features, maps.mean((2, 3)))


def test_initialization_is_hes_by_fan_out():
    torch.manual_seed(0)
    network = create_encoder("resnet18")
    for name in ("conv1", "layer1.0.conv1", "layer3.0.conv1", "layer4.0.downsample.0"):
        layer = network.get_submodule(name)
        fan_out = layer.out_channels * layer.kernel_size[0] ** 2
        assert layer.weight.std().item() == pytest.approx((2 / fan_out) ** 0.5, rel=0.05)
    assert network.layer1[0].bn2.weight.eq(1).all()  # the residual's last batch norm does not start at zero


@pytest.mark.parametrize(("make", "arguments"), [(projection_head, (96, 80, 24)), (prediction_head, (24, 80, 40))])
def test_heads_are_linear_norm_relu_linear_norm(make, arguments):
    torch.manual_seed(0)
    head = make(*arguments).double()
    inputs = torch.randn(7, arguments[0], dtype=torch.float64)
    first, second = (part.weight for part in head if isinstance(part, nn.Linear))
    assert {name for name, _ in head.named_parameters() if "bias" in name} == {"1.bias", "4.bias"}

    def norm(values):
        return (values - values.mean(0)) / (values.var(0, unbiased=False) + 1e-5).sqrt()

    expected = norm(norm(inputs @ first.T).relu() @ second.T)
    torch.testing.assert_close(head(inputs), expected)


def test_heads_default_to_the_papers_widths():
    head = projection_head(512)
    assert [part.weight.shape for part in head if isinstance(part, nn.Linear)] == [(512, 512), (128, 512)]
    assert [part.weight.shape for part in prediction_head() if isinstance(part, nn.Linear)] == [(512, 128), (128, 512)]


def test_any_module_becomes_an_encoder_untouched():
    module = nn.Sequential(nn.Conv2d(3, 10, 3), nn.BatchNorm2d(10), nn.Dropout(0.5))
    module[2].eval()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    network = as_encoder(module, image_size=12)
    assert network.width == 10
    assert [part.training for part in module.modules()] == [True, True, True, False]
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor, before[name])
    images = torch.randn(4, 3, 12, 12)
    network.eval()
    torch.testing.assert_close(network(images), module(images).mean((2, 3)))


def test_a_module_that_gives_vectors_is_left_as_it_is():
    module = nn.Sequential(nn.Flatten(), nn.Linear(3 * 64, 17))
    network = as_encoder(module, image_size=8)
    images = torch.randn(5, 3, 8, 8)
    assert network.width == 17
    torch.testing.assert_close(network(images), module(images))


@pytest.mark.parametrize(
    ("module", "says"),
    [
        (nn.Linear(5, 5), "does not take images of 16 pixels"),
        (nn.Flatten(2), r"shape \(2, 3, 256\)"),
        (nn.Flatten(0), r"shape \(1536,\)"),
        (nn.AdaptiveMaxPool2d(2, return_indices=True), "type tuple"),
    ],
)
def test_a_module_that_is_no_encoder_is_refused(module, says):
    with pytest.raises(UserError, match=says):
        as_encoder(module, image_size=16)


def test_an_unknown_name_is_refused_with_the_nearest():
    with pytest.raises(UserError, match=r"'resnet19' is not known \(did you mean 'resnet18'\?\)"):
        create_encoder("resnet19")
    with pytest.raises(UserError, match="use tiny, resnet18, resnet34, resnet50, torchvision/NAME or timm/NAME"):
        create_encoder("clip/vit")
    with pytest.raises(UserError, match="the stem 'large' is not known; use cifar, imagenet or auto"):
        create_encoder("tiny", stem="large")


@pytest.mark.parametrize("package", ["torchvision", "timm"])
@pytest.mark.parametrize("failure", [ImportError, RuntimeError])
def test_a_missing_package_is_named_with_the_way_to_install_it(package, failure, monkeypatch):
    def refuse(name, *_):
        raise failure(f"no {name}")

    monkeypatch.setattr("psm.models.factory.importlib.import_module", refuse)
    with pytest.raises(UserError, match=rf"pip install 'psm\[{package}\]'"):
        create_encoder(f"{package}/resnet18")


def test_a_library_encoder_has_its_own_stem():
    with pytest.raises(UserError, match="comes with its own stem"):
        create_encoder("torchvision/resnet18", stem="cifar")


def test_channels_last_changes_no_value():
    torch.manual_seed(0)
    network = create_encoder("tiny").eval()
    images = torch.randn(3, 3, 32, 32)
    plain = network(images)
    network.to(memory_format=torch.channels_last)
    torch.testing.assert_close(network(images.to(memory_format=torch.channels_last)), plain, rtol=1e-4, atol=1e-4)
    assert prefers_channels_last("cpu")
    assert prefers_channels_last(torch.device("cuda", 1))
    assert not prefers_channels_last("mps")


def optional(package: str):
    """An optional package, or a skip whatever the reason it cannot be imported for."""
    try:
        return pytest.importorskip(package)
    except Exception as error:
        pytest.skip(f"{package} cannot be imported: {error}")


@pytest.mark.parametrize("name", RESNETS)
def test_weights_load_in_torchvision(name):
    models = optional("torchvision").models
    ours = create_encoder(name, stem="imagenet")
    theirs = getattr(models, name)(weights=None)
    theirs.fc = nn.Identity()
    theirs.load_state_dict(ours.state_dict(), strict=True)
    images = torch.randn(2, 3, 64, 64)
    torch.testing.assert_close(ours.eval()(images), theirs.eval()(images))


@pytest.mark.parametrize(
    ("name", "width"),
    [("torchvision/resnet18", 512), ("torchvision/mobilenet_v3_small", 1024), ("timm/resnet18", 512)],
)
def test_library_encoders_lose_their_classifier(name, width):
    optional(name.split("/")[0])
    network = create_encoder(name, image_size=64)
    assert network.width == width
    assert network.eval()(torch.randn(2, 3, 64, 64)).shape == (2, width)
    with pytest.raises(UserError, match="did you mean"):
        create_encoder(name + "x")


def test_pooling_before_the_relu_changes_neither_value_nor_gradient():
    """The stem of the paper of residual networks has them the other way round."""
    maps = torch.randn(2, 4, 9, 9, dtype=torch.double).round(decimals=1).requires_grad_()  # with ties
    pool = create_encoder("tiny", "imagenet").maxpool
    ways = functional.relu(pool(maps)), pool(functional.relu(maps))
    gradients = [torch.autograd.grad(out.square().sum(), maps)[0] for out in ways]
    assert torch.equal(*ways)
    assert torch.equal(*gradients)
