"""Residual networks with the names and shapes of torchvision's in their state dict.

Weights trained here load in torchvision's ResNet with ``strict=True`` once its classifier is removed
(``fc = Identity()``), and the other way round.
"""

from torch import Tensor, nn

from psm.kernels.basic_block import residual
from psm.kernels.dispatch import in_one, rectified


class BasicBlock(nn.Module):
    """Two 3x3 convolutions around a shortcut."""

    expansion = 1

    def __init__(self, inputs: int, width: int, stride: int):
        super().__init__()
        self.conv1 = convolution(inputs, width, 3, stride)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = convolution(width, width, 3)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = shortcut(inputs, width, stride)

    def forward(self, maps: Tensor) -> Tensor:
        if in_one(self, maps):
            return residual(self, maps)
        inner = rectified(self.bn1, self.conv1(maps))
        return rectified(self.bn2, self.conv2(inner), plus=self.downsample(maps))


class Bottleneck(nn.Module):
    """A 3x3 convolution between two 1x1 ones, around a shortcut; the 3x3 carries the stride (v1.5)."""

    expansion = 4

    def __init__(self, inputs: int, width: int, stride: int):
        super().__init__()
        outputs = width * self.expansion
        self.conv1 = convolution(inputs, width, 1)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = convolution(width, width, 3, stride)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = convolution(width, outputs, 1)
        self.bn3 = nn.BatchNorm2d(outputs)
        self.downsample = shortcut(inputs, outputs, stride)

    def forward(self, maps: Tensor) -> Tensor:
        inner = rectified(self.bn1, self.conv1(maps))
        inner = rectified(self.bn2, self.conv2(inner))
        return rectified(self.bn3, self.conv3(inner), plus=self.downsample(maps))


class ResNet(nn.Module):
    """Images (B, 3, H, W) to features (B, width): a stem, four stages of residual blocks, an average over places."""

    def __init__(
        self,
        block: type[BasicBlock | Bottleneck],
        blocks: tuple[int, ...],
        widths: tuple[int, ...] = (64, 128, 256, 512),
        stem: str = "imagenet",
        cifar_stride: int = 1,
    ):
        super().__init__()
        self.stem = stem
        if stem == "imagenet":
            self.conv1 = convolution(3, widths[0], 7, stride=2)
            self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        else:
            self.conv1 = convolution(3, widths[0], 3, cifar_stride)
            self.maxpool = nn.Identity()
        self.bn1 = nn.BatchNorm2d(widths[0])
        inputs = widths[0]
        for stage, (count, width) in enumerate(zip(blocks, widths, strict=True), start=1):
            layer = []
            for index in range(count):
                layer.append(block(inputs, width, stride=2 if stage > 1 and index == 0 else 1))
                inputs = width * block.expansion
            self.add_module(f"layer{stage}", nn.Sequential(*layer))
        self.width = inputs

    def forward(self, images: Tensor) -> Tensor:
        maps = self.maxpool(rectified(self.bn1, self.conv1(images)))
        maps = self.layer4(self.layer3(self.layer2(self.layer1(maps))))
        return maps.mean((2, 3))


def convolution(inputs: int, outputs: int, size: int, stride: int = 1) -> nn.Conv2d:
    """A convolution before a batch norm: no bias, sides kept (before the stride), He's initialization by fan-out."""
    layer = nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False)
    nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
    return layer


def shortcut(inputs: int, outputs: int, stride: int) -> nn.Module:
    """The way past a block: the identity where shapes agree, else a 1x1 convolution."""
    if inputs == outputs and stride == 1:
        return nn.Identity()
    return nn.Sequential(convolution(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs))
