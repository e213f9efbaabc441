"""Handwritten digits that come with scikit-learn: 1797 grey images of 8x8."""

import lightning as L
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, Dataset, TensorDataset, random_split


class DigitsDataModule(L.LightningDataModule):
    """Batches of images (N, 1, image_size, image_size) in [0, 1] and labels (N,); a fixed fifth is for validation.

    What is left for training after the last whole batch is dropped, so that all steps take as long.
    """

    def __init__(self, *, batch_size: int = 64, image_size: int = 8) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.image_size = image_size

    def setup(self, stage: str) -> None:
        digits = load_digits()
        images = torch.from_numpy(digits.images).float().unsqueeze(1) / 16
        if self.image_size != images.shape[-1]:
            images = F.interpolate(images, self.image_size, mode="bilinear")
        dataset = TensorDataset(images, torch.from_numpy(digits.target).long())
        self.train, self.val = random_split(dataset, [0.8, 0.2], torch.Generator().manual_seed(0))

    def train_dataloader(self) -> DataLoader:
        return self._loader(self.train, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        return self._loader(self.val)

    def predict_dataloader(self) -> DataLoader:
        return self._loader(self.val)

    def _loader(self, dataset: Dataset, *, shuffle: bool = False) -> DataLoader:
        return DataLoader(dataset, self.batch_size, shuffle=shuffle, drop_last=shuffle)
