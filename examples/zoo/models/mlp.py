"""OneFlow's two-stage multi-layer perceptron."""

from torch import nn


def mlp(*, in_features: int = 784, width: int = 512, num_classes: int = 10) -> nn.Sequential:
    """Images of ``in_features`` values become logits (N, num_classes), which the last ReLU keeps above zero."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(in_features, width),
        nn.ReLU(),
        nn.Linear(width, width),
        nn.ReLU(),
        nn.Linear(width, num_classes),
        nn.ReLU(),
    )
