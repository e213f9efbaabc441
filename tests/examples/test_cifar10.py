"""The reader of CIFAR-10's binary archive, on a small archive of the same format."""

import hashlib
import io
import tarfile
from pathlib import Path

import pytest
import torch

from zoo.data.cifar10 import MEAN, RECORD, STD, TEST_FILES, TRAIN_FILES, Cifar10, Cifar10DataModule

PER_FILE = 4


def write_archive(path: Path, *, names: tuple[str, ...] = TRAIN_FILES + TEST_FILES, cut: int = 0) -> str:
    """Writes an archive of random records without their last ``cut`` bytes, and returns its MD5."""
    generator = torch.Generator().manual_seed(0)
    with tarfile.open(path, "w:gz") as tar:
        for number, name in enumerate(names):
            records = torch.randint(0, 256, (PER_FILE, RECORD), generator=generator, dtype=torch.uint8)
            records[:, 0] = number
            records[0, 1:4] = torch.tensor([10, 20, 30])  # the first row's first reds
            records[0, 1 + 1024] = 40  # the first green
            data = bytes(records.flatten().tolist())[: PER_FILE * RECORD - cut]
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return hashlib.md5(path.read_bytes()).hexdigest()


def test_records_become_images_and_labels(tmp_path: Path) -> None:
    md5 = write_archive(tmp_path / "cifar-10-binary.tar.gz")
    data = Cifar10DataModule(data_dir=str(tmp_path), batch_size=6, image_size=40, md5=md5)
    data.setup("fit")
    assert data.train.labels.tolist() == [number for number in range(5) for _ in range(PER_FILE)]
    assert data.val.labels.tolist() == [5] * PER_FILE
    assert data.train.images[0, 0, 0, :3].tolist() == [10, 20, 30]
    assert data.train.images[0, 1, 0, 0] == 40

    batches = list(data.train_dataloader())
    assert [tuple(images.shape) for images, _ in batches] == [(6, 3, 40, 40)] * 3
    assert sum(len(labels) for _, labels in data.val_dataloader()) == PER_FILE


def test_augmentation_shifts_and_mirrors_whole_pixels() -> None:
    image = torch.arange(3 * 32 * 32).remainder(251).to(torch.uint8).view(1, 3, 32, 32)
    label = torch.tensor([7])
    plain = Cifar10(image, label, image_size=32, augment=False)[0][0]
    assert torch.allclose(plain * STD + MEAN, image[0] / 255, atol=1e-6)

    torch.manual_seed(0)
    dataset = Cifar10(image, label, image_size=32, augment=True)
    crops = torch.nn.functional.pad(image, (4, 4, 4, 4))[0].unfold(1, 32, 1).unfold(2, 32, 1).flatten(1, 2)
    candidates = torch.cat([crops, crops.flip(-1)], dim=1).transpose(0, 1)  # (2 * 81, 3, 32, 32)
    seen = set()
    for _ in range(40):
        shown = (dataset[0][0] * STD + MEAN).mul(255).round().to(torch.uint8)
        matches = (candidates == shown).flatten(1).all(1).nonzero().flatten().tolist()
        assert matches
        seen.add(matches[0] // 81)
    assert seen == {0, 1}


def test_a_missing_archive_says_where_it_should_be(tmp_path: Path) -> None:
    data = Cifar10DataModule(data_dir=str(tmp_path / "data"))
    data.prepare_data()
    with pytest.raises(FileNotFoundError, match=r"data/cifar-10-binary\.tar\.gz.*data\.download=true"):
        data.setup("fit")


def test_a_download_happens_once_and_is_checked(tmp_path: Path) -> None:
    source = tmp_path / "source.tar.gz"
    md5 = write_archive(source)
    data = Cifar10DataModule(data_dir=str(tmp_path / "data"), download=True, url=source.as_uri(), md5=md5)
    data.prepare_data()
    source.unlink()
    data.prepare_data()
    data.setup("fit")
    assert len(data.train) == 5 * PER_FILE
    assert [path.name for path in (tmp_path / "data").iterdir()] == ["cifar-10-binary.tar.gz"]

    data.archive.write_bytes(data.archive.read_bytes()[:-1])
    with pytest.raises(ValueError, match=f"not {md5}.*Delete it"):
        data.setup("fit")


def test_another_archive_is_refused(tmp_path: Path) -> None:
    archive = tmp_path / "cifar-10-binary.tar.gz"
    data = Cifar10DataModule(data_dir=str(tmp_path), md5=None)
    write_archive(archive, names=TRAIN_FILES[:4])
    with pytest.raises(ValueError, match=r"has no cifar-10-batches-bin/data_batch_5\.bin"):
        data.setup("fit")
    write_archive(archive, cut=1)
    with pytest.raises(ValueError, match="no whole records"):
        data.setup("fit")
