"""Text that every machine has: the sources of Python's own standard library, character by character."""

import sysconfig
from pathlib import Path

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

VOCAB_SIZE = 128
"""ASCII. Every other character reads as 0."""


class Windows(Dataset):
    """Windows of ``length`` characters, one after the other, each with the characters that come next."""

    def __init__(self, text: Tensor, length: int) -> None:
        if len(text) <= length:
            raise ValueError(f"The text has {len(text)} characters, too few for a window of {length} and the next one.")
        self.text = text
        self.length = length

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = index * self.length
        window = self.text[start : start + self.length + 1]
        return window[:-1], window[1:]


class StdlibTextDataModule(L.LightningDataModule):
    """Batches of ids and next ids, both (batch_size, length), from the first ``num_chars`` characters of the sources.

    ``folder`` is where the sources are, by default this Python's standard library. A tenth is for validation.
    """

    def __init__(
        self, *, batch_size: int = 32, length: int = 128, num_chars: int = 1_000_000, folder: str | None = None
    ) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.length = length
        self.num_chars = num_chars
        self.folder = Path(folder or sysconfig.get_path("stdlib"))

    def setup(self, stage: str) -> None:
        text = read_sources(self.folder, self.num_chars)
        cut = len(text) * 9 // 10
        self.train = Windows(text[:cut], self.length)
        self.val = Windows(text[cut:], self.length)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.train, self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.val, self.batch_size)


def read_sources(folder: Path, num_chars: int) -> Tensor:
    """The ids (int64) of the first ``num_chars`` characters of the Python files in ``folder``, in order of name."""
    text = bytearray()
    for path in sorted(folder.glob("*.py")):
        text += path.read_bytes()
        if len(text) >= num_chars:
            break
    if not text:
        raise FileNotFoundError(f"There are no .py files in {folder}. Name a folder that has some with data.folder=...")
    ids = torch.frombuffer(text, dtype=torch.uint8)[:num_chars].long()
    return ids.masked_fill(ids >= VOCAB_SIZE, 0)
