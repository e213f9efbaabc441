"""Residual networks: a small one for digits, and ResNet-50."""

from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn.functional import relu


def conv(in_channels: int, out_channels: int, *, kernel_size: int, stride: int = 1) -> nn.Sequential:
    """A convolution that keeps the size (up to its stride), and batch normalisation."""
    convolution = nn.Conv2d(in_channels, out_channels, kernel_size, stride=stride, padding=kernel_size // 2, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(out_channels))


class ResidualBlock(nn.Module):
    """relu(branch(x) + shortcut(x)): two 3x3 convolutions, or a 3x3 one of a quarter the width between two 1x1."""

    def __init__(self, in_channels: int, out_channels: int, *, stride: int, bottleneck: bool) -> None:
        super().__init__()
        if bottleneck:
            width = out_channels // 4
            self.branch = nn.Sequential(
                conv(in_channels, width, kernel_size=1),
                nn.ReLU(),
                conv(width, width, kernel_size=3, stride=stride),
                nn.ReLU(),
                conv(width, out_channels, kernel_size=1),
            )
        else:
            self.branch = nn.Sequential(
                conv(in_channels, out_channels, kernel_size=3, stride=stride),
                nn.ReLU(),
                conv(out_channels, out_channels, kernel_size=3),
            )
        same = stride == 1 and in_channels == out_channels
        self.shortcut = nn.Identity() if same else conv(in_channels, out_channels, kernel_size=1, stride=stride)

    def forward(self, x: Tensor) -> Tensor:
        return relu(self.branch(x) + self.shortcut(x))


class ResNet(nn.Module):
    """A stem, ``layer1`` to ``layerN`` of residual blocks, the mean over the image, and a linear classifier.

    Every layer after the first halves the image's sides. Images (N, C, H, W) become logits (N, num_classes).
    """

    def __init__(
        self,
        *,
        stem: nn.Module,
        stem_width: int,
        widths: Sequence[int],
        depths: Sequence[int],
        bottleneck: bool,
        num_classes: int,
    ) -> None:
        super().__init__()
        self.stem = stem
        self.layer_names = [f"layer{number}" for number in range(1, len(widths) + 1)]
        in_channels = stem_width
        for name, width, depth in zip(self.layer_names, widths, depths, strict=True):
            strides = [1 if name == "layer1" else 2] + [1] * (depth - 1)
            channels = [in_channels] + [width] * (depth - 1)
            blocks = [
                ResidualBlock(channel, width, stride=stride, bottleneck=bottleneck)
                for channel, stride in zip(channels, strides, strict=True)
            ]
            self.add_module(name, nn.Sequential(*blocks))
            in_channels = width
        self.fc = nn.Linear(in_channels, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images)
        for name in self.layer_names:
            x = self.get_submodule(name)(x)
        return self.fc(x.mean((2, 3)))


def digits_resnet(num_classes: int = 10) -> ResNet:
    """For grey images (N, 1, 8, 8)."""
    stem = nn.Sequential(conv(1, 32, kernel_size=3), nn.ReLU())
    return ResNet(
        stem=stem, stem_width=32, widths=(32, 64, 128), depths=(2, 2, 2), bottleneck=False, num_classes=num_classes
    )


def resnet50(num_classes: int = 10) -> ResNet:
    """ResNet-50 for colour images (N, 3, 224, 224), as in MindSpore's pipeline example."""
    stem = nn.Sequential(conv(3, 64, kernel_size=7, stride=2), nn.ReLU(), nn.MaxPool2d(3, stride=2, padding=1))
    return ResNet(
        stem=stem,
        stem_width=64,
        widths=(256, 512, 1024, 2048),
        depths=(3, 4, 6, 3),
        bottleneck=True,
        num_classes=num_classes,
    )
