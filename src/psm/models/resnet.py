"""Residual networks with the names and shapes of torchvision's in their state dict.

Weights trained here load in torchvision's ResNet with ``strict=True`` once its classifier is removed
(``fc = Identity()``), and the other way round.
"""

from torch import Tensor, nn
from torch.nn.functional import relu

from psm.models.encoder import Encoder


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut: (B, inputs, H, W) to (B, width, H / stride, W / stride)."""

    expansion = 1

    def __init__(self, inputs: int, width: int, stride: int):
        super().__init__()
        self.conv1 = convolution(inputs, width, 3, stride)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = convolution(width, width, 3)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = shortcut(inputs, width, stride)

    def forward(self, x: Tensor) -> Tensor:
        out = relu(self.bn1(self.conv1(x)), inplace=True)
        out = self.bn2(self.conv2(out))
        out += self.downsample(x)
        return relu(out, inplace=True)


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions and a shortcut; the 3x3 one has the stride (ResNet v1.5).

    (B, inputs, H, W) to (B, 4 * width, H / stride, W / stride).
    """

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

    def forward(self, x: Tensor) -> Tensor:
        out = relu(self.bn1(self.conv1(x)), inplace=True)
        out = relu(self.bn2(self.conv2(out)), inplace=True)
        out = self.bn3(self.conv3(out))
        out += self.downsample(x)
        return relu(out, inplace=True)


class ResNet(Encoder):
    """Images (B, 3, H, W) to features (B, width): stem, four stages of residual blocks, global average pooling."""

    def __init__(
        self,
        block: type[BasicBlock | Bottleneck],
        blocks: tuple[int, int, int, int],
        widths: tuple[int, int, int, int] = (64, 128, 256, 512),
        stem: str = "imagenet",
        cifar_stride: int = 1,
    ):
        """Build the network.

        Args:
            block: The kind of residual block.
            blocks: Number of blocks in each stage.
            widths: Channels of each stage, before the block's expansion.
            stem: ``imagenet``: 7x7 convolution of stride 2 and max pooling; ``cifar``: 3x3 convolution.
            cifar_stride: Stride of the CIFAR stem.
        """
        super().__init__()
        self.stem = stem
        self.maxpool: nn.Module
        if stem == "imagenet":
            self.conv1 = convolution(3, widths[0], 7, stride=2)
            self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        else:
            self.conv1 = convolution(3, widths[0], 3, cifar_stride)
            self.maxpool = nn.Identity()
        self.bn1 = nn.BatchNorm2d(widths[0])
        channels = [widths[0], *(width * block.expansion for width in widths)]
        self.layer1 = stage(block, blocks[0], channels[0], widths[0], stride=1)
        self.layer2 = stage(block, blocks[1], channels[1], widths[1], stride=2)
        self.layer3 = stage(block, blocks[2], channels[2], widths[2], stride=2)
        self.layer4 = stage(block, blocks[3], channels[3], widths[3], stride=2)
        self.width = channels[4]

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(relu(self.bn1(self.conv1(x)), inplace=True))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return x.mean((2, 3))


def stage(block: type[BasicBlock | Bottleneck], count: int, inputs: int, width: int, stride: int) -> nn.Sequential:
    """A sequence of residual blocks, the first of which has the stride."""
    first = block(inputs, width, stride)
    return nn.Sequential(first, *(block(width * block.expansion, width, stride=1) for _ in range(count - 1)))


def convolution(inputs: int, outputs: int, size: int, stride: int = 1) -> nn.Conv2d:
    """Convolution without bias, padded to keep H and W at stride 1; He initialization by fan-out."""
    layer = nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False)
    nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
    return layer


def shortcut(inputs: int, outputs: int, stride: int) -> nn.Module:
    """The shortcut of a block: the identity if shapes agree, otherwise a 1x1 convolution and batch norm."""
    if inputs == outputs and stride == 1:
        return nn.Identity()
    return nn.Sequential(convolution(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs))
