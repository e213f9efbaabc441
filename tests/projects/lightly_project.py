"""lightly: SimCLR, BYOL, MoCo and DINO, as its examples write them, with a small ResNet."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import torch

# torchvision's compiled operators, which none of this uses, are there for GPUs only; its Python asks for these names.
_names = torch.library.Library("torchvision", "FRAGMENT")
for _name in ("nms", "qnms"):
    _names.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

import pytorch_lightning as pl  # noqa: E402
from common import Case, main  # noqa: E402
from lightly.data import LightlyDataset  # noqa: E402
from lightly.loss import DINOLoss, NegativeCosineSimilarity, NTXentLoss  # noqa: E402
from lightly.models import ResNetGenerator  # noqa: E402
from lightly.models.modules import (  # noqa: E402
    BYOLPredictionHead,
    BYOLProjectionHead,
    DINOProjectionHead,
    MoCoProjectionHead,
    SimCLRProjectionHead,
)
from lightly.models.utils import deactivate_requires_grad, update_momentum  # noqa: E402
from lightly.transforms import BYOLTransform, DINOTransform, MoCoV2Transform, SimCLRTransform  # noqa: E402
from lightly.transforms.byol_transform import BYOLView1Transform, BYOLView2Transform  # noqa: E402
from lightly.utils.scheduler import cosine_schedule  # noqa: E402
from PIL import Image  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.utils.data import DataLoader, Dataset  # noqa: E402

FEATURES = 64
HEADS = {"backbone": 0, "backbone_momentum": 0, "projection_head": 1, "projection_head_momentum": 1}


def backbone() -> nn.Sequential:
    resnet = ResNetGenerator("resnet-9", width=0.125)
    return nn.Sequential(*list(resnet.children())[:-1], nn.AdaptiveAvgPool2d(1))


class _Trained(pl.LightningModule):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.06)


class SimCLR(_Trained):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = backbone()
        self.projection_head = SimCLRProjectionHead(FEATURES, 32, 16)
        self.criterion = NTXentLoss()

    def forward(self, x: Tensor) -> Tensor:
        return self.projection_head(self.backbone(x).flatten(start_dim=1))

    def training_step(self, batch: Any, batch_index: int) -> Tensor:
        (x0, x1), _, _ = batch
        loss = self.criterion(self.forward(x0), self.forward(x1))
        self.log("train_loss_ssl", loss)
        return loss


class BYOL(_Trained):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = backbone()
        self.projection_head = BYOLProjectionHead(FEATURES, 32, 16)
        self.prediction_head = BYOLPredictionHead(16, 32, 16)
        self.backbone_momentum = copy.deepcopy(self.backbone)
        self.projection_head_momentum = copy.deepcopy(self.projection_head)
        deactivate_requires_grad(self.backbone_momentum)
        deactivate_requires_grad(self.projection_head_momentum)
        self.criterion = NegativeCosineSimilarity()

    def forward(self, x: Tensor) -> Tensor:
        return self.prediction_head(self.projection_head(self.backbone(x).flatten(start_dim=1)))

    def forward_momentum(self, x: Tensor) -> Tensor:
        return self.projection_head_momentum(self.backbone_momentum(x).flatten(start_dim=1)).detach()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        momentum = cosine_schedule(self.current_epoch, 10, 0.996, 1)
        update_momentum(self.backbone, self.backbone_momentum, m=momentum)
        update_momentum(self.projection_head, self.projection_head_momentum, m=momentum)
        (x0, x1) = batch[0]
        p0, z0 = self.forward(x0), self.forward_momentum(x0)
        p1, z1 = self.forward(x1), self.forward_momentum(x1)
        loss = 0.5 * (self.criterion(p0, z1) + self.criterion(p1, z0))
        self.log("train_loss", loss)
        return loss


class MoCo(_Trained):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = backbone()
        self.projection_head = MoCoProjectionHead(FEATURES, 32, 16)
        self.backbone_momentum = copy.deepcopy(self.backbone)
        self.projection_head_momentum = copy.deepcopy(self.projection_head)
        deactivate_requires_grad(self.backbone_momentum)
        deactivate_requires_grad(self.projection_head_momentum)
        self.criterion = NTXentLoss(memory_bank_size=(32, 16))

    def forward(self, x: Tensor) -> Tensor:
        return self.projection_head(self.backbone(x).flatten(start_dim=1))

    def forward_momentum(self, x: Tensor) -> Tensor:
        return self.projection_head_momentum(self.backbone_momentum(x).flatten(start_dim=1)).detach()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        momentum = cosine_schedule(self.current_epoch, 10, 0.996, 1)
        update_momentum(self.backbone, self.backbone_momentum, m=momentum)
        update_momentum(self.projection_head, self.projection_head_momentum, m=momentum)
        x_query, x_key = batch[0]
        loss = self.criterion(self.forward(x_query), self.forward_momentum(x_key))
        self.log("train_loss", loss)
        return loss


class DINO(_Trained):
    def __init__(self) -> None:
        super().__init__()
        self.student_backbone = backbone()
        self.student_head = DINOProjectionHead(FEATURES, 32, 16, 64, freeze_last_layer=1)
        self.teacher_backbone = copy.deepcopy(self.student_backbone)
        self.teacher_head = DINOProjectionHead(FEATURES, 32, 16, 64)
        deactivate_requires_grad(self.teacher_backbone)
        deactivate_requires_grad(self.teacher_head)
        self.criterion = DINOLoss(output_dim=64, warmup_teacher_temp_epochs=5)

    def forward(self, x: Tensor) -> Tensor:
        return self.student_head(self.student_backbone(x).flatten(start_dim=1))

    def forward_teacher(self, x: Tensor) -> Tensor:
        return self.teacher_head(self.teacher_backbone(x).flatten(start_dim=1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        momentum = cosine_schedule(self.current_epoch, 10, 0.996, 1)
        update_momentum(self.student_backbone, self.teacher_backbone, m=momentum)
        update_momentum(self.student_head, self.teacher_head, m=momentum)
        views = [view.to(self.device) for view in batch[0]]
        teacher_out = [self.forward_teacher(view) for view in views[:2]]
        student_out = [self.forward(view) for view in views]
        loss = self.criterion(teacher_out, student_out, epoch=self.current_epoch)
        self.log("train_loss", loss)
        return loss

    def on_after_backward(self) -> None:
        self.student_head.cancel_last_layer_gradients(current_epoch=self.current_epoch)


class Images(Dataset):
    """Pictures of noise."""

    def __init__(self, transform: Any) -> None:
        self.transform = transform

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> tuple[Any, int]:
        values = torch.randint(0, 255, (24, 24, 3), generator=torch.Generator().manual_seed(index), dtype=torch.uint8)
        return self.transform(Image.fromarray(values.numpy())), index % 3


def fit(module: Any, transform: Any, trainer_kwargs: dict[str, Any]) -> None:
    dataset = LightlyDataset.from_torch_dataset(Images(transform()))
    loader = DataLoader(dataset, batch_size=8, shuffle=True, drop_last=True)
    trainer = pl.Trainer(max_epochs=2, enable_checkpointing=False, **trainer_kwargs)
    trainer.fit(model=module(), train_dataloaders=loader)


def _byol_views() -> Any:
    return BYOLTransform(BYOLView1Transform(input_size=16), BYOLView2Transform(input_size=16))


def _dino_views() -> Any:
    return DINOTransform(global_crop_size=16, local_crop_size=12, n_local_views=2)


if __name__ == "__main__":
    main(
        {
            "SimCLR": Case(partial(fit, SimCLR, partial(SimCLRTransform, input_size=16)), key={"projection_head": 1}),
            "BYOL": Case(partial(fit, BYOL, _byol_views), key=HEADS),
            "MoCo": Case(
                partial(fit, MoCo, partial(MoCoV2Transform, input_size=16)),
                key=HEADS,
            ),
            "DINO": Case(
                partial(fit, DINO, _dino_views),
                key={"student_backbone": 0, "teacher_backbone": 0, "student_head": 1, "teacher_head": 1},
            ),
        },
        "pytorch_lightning",
    )
