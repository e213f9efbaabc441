"""CIFAR-10 from its official binary archive."""

import hashlib
import shutil
import tarfile
import urllib.request
from pathlib import Path

import lightning as L
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

URL = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
MD5 = "c32a1d4ab5d03f1284b67883e8d87530"

SIDE = 32
RECORD = 1 + 3 * SIDE * SIDE  # a label, then the red, green and blue planes
TRAIN_FILES = tuple(f"cifar-10-batches-bin/data_batch_{number}.bin" for number in range(1, 6))
TEST_FILES = ("cifar-10-batches-bin/test_batch.bin",)

# As in MindSpore's example, which lists the means in this order.
MEAN = torch.tensor([0.4465, 0.4822, 0.4914]).view(3, 1, 1)
STD = torch.tensor([0.2010, 0.1994, 0.2023]).view(3, 1, 1)


class Cifar10(Dataset):
    """Pairs of an image (3, image_size, image_size), normalised, and its label.

    With ``augment`` the image is cropped at random from itself with a border of 4 and mirrored half of the time.
    """

    def __init__(self, images: Tensor, labels: Tensor, *, image_size: int, augment: bool) -> None:
        self.images = images
        self.labels = labels
        self.image_size = image_size
        self.augment = augment

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image = self.images[index]
        if self.augment:
            top, left = torch.randint(0, 9, (2,)).tolist()
            image = F.pad(image, (4, 4, 4, 4))[:, top : top + SIDE, left : left + SIDE]
            if torch.rand(()) < 0.5:
                image = image.flip(-1)
        image = image.float() / 255
        if self.image_size != SIDE:
            image = F.interpolate(image[None], self.image_size, mode="bilinear")[0]
        return (image - MEAN) / STD, self.labels[index]


class Cifar10DataModule(L.LightningDataModule):
    """Batches of images (N, 3, image_size, image_size) and labels (N,) from ``<data_dir>/cifar-10-binary.tar.gz``.

    The archive is read in place. With ``download`` it is fetched from ``url`` when it is missing; ``md5`` is its
    checksum, and None skips the check. A last training batch of fewer images is dropped. A missing archive is a
    ``FileNotFoundError``, another checksum or format a ``ValueError``.
    """

    def __init__(
        self,
        *,
        data_dir: str,
        batch_size: int = 32,
        image_size: int = 224,
        num_workers: int = 0,
        download: bool = False,
        url: str = URL,
        md5: str | None = MD5,
    ) -> None:
        super().__init__()
        self.archive = Path(data_dir) / "cifar-10-binary.tar.gz"
        self.batch_size = batch_size
        self.image_size = image_size
        self.num_workers = num_workers
        self.download = download
        self.url = url
        self.md5 = md5

    def prepare_data(self) -> None:
        if self.download and not self.archive.exists():
            fetch(self.url, self.archive)

    def setup(self, stage: str) -> None:
        if not self.archive.exists():
            raise FileNotFoundError(
                f"CIFAR-10 is not at {self.archive.absolute()}. Put {self.url} there, or add data.download=true where"
                " there is a network."
            )
        check_md5(self.archive, self.md5)
        size = self.image_size
        self.train = Cifar10(*read_archive(self.archive, TRAIN_FILES), image_size=size, augment=True)
        self.val = Cifar10(*read_archive(self.archive, TEST_FILES), image_size=size, augment=False)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.train, self.batch_size, shuffle=True, drop_last=True, num_workers=self.num_workers)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.val, self.batch_size, num_workers=self.num_workers)


def read_archive(archive: Path, names: tuple[str, ...]) -> tuple[Tensor, Tensor]:
    """The images (N, 3, 32, 32), uint8, and labels (N,), int64, of the named files of the archive."""
    with tarfile.open(archive) as tar:
        files = {member.name: tar.extractfile(member) for member in tar if member.name in names}
        missing = [name for name in names if files.get(name) is None]
        if missing:
            raise ValueError(
                f"{archive} has no {', '.join(missing)}. It should be the binary version of CIFAR-10, {URL}."
            )
        data = b"".join(file.read() for name in names if (file := files[name]))
    if len(data) % RECORD:
        raise ValueError(f"{archive}: {len(data)} bytes in {', '.join(names)} are no whole records of {RECORD} bytes.")
    records = torch.from_numpy(np.frombuffer(data, dtype=np.uint8).copy()).view(-1, RECORD)
    return records[:, 1:].reshape(-1, 3, SIDE, SIDE), records[:, 0].long()


def fetch(url: str, path: Path) -> None:
    """Downloads to ``path``, which appears only once it is whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    with urllib.request.urlopen(url) as response, part.open("wb") as file:
        shutil.copyfileobj(response, file)
    part.replace(path)


def check_md5(path: Path, expected: str | None) -> None:
    """Raises ``ValueError`` unless the file's MD5 is ``expected``; None skips the check."""
    if expected is None:
        return
    digest = hashlib.md5(path.read_bytes(), usedforsecurity=False).hexdigest()
    if digest != expected:
        raise ValueError(f"{path} has the MD5 {digest}, not {expected}. Delete it and download it again.")
