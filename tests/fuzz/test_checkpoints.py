"""Damaged checkpoints, folders and files of weights are told as such, and run nothing."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable
from pathlib import Path

import lightning as L
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn

from lightning_pipeline.checkpoint.check import check_checkpoint, check_format, check_optimizers
from lightning_pipeline.checkpoint.files import AtomicCheckpointIO
from lightning_pipeline.checkpoint.folder import convert_checkpoint, read_folder, replace_stored
from lightning_pipeline.checkpoint.folder_metadata import _OPCODES, read_metadata
from lightning_pipeline.checkpoint.optimizer_layout import OptimizerLayout
from lightning_pipeline.checkpoint.torch_files import CheckpointError
from lightning_pipeline.checkpoint.weights import load_weights
from tests.fuzz.outcomes import VALUES, damaged, mutated, taken


class Lit(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)


def load(path: Path) -> None:
    """All that a run does with a checkpoint before it changes anything."""
    module = Lit()
    layout = OptimizerLayout(torch.optim.Adam(module.parameters()), module)
    checkpoint = read_folder(path) if path.is_dir() else AtomicCheckpointIO(weights_only=True).load_checkpoint(path)
    check_format(checkpoint, path)
    check_checkpoint(checkpoint, module, strict=True, goes_on=True, path=path)
    check_optimizers(checkpoint, module, [layout], path=path)
    replace_stored(checkpoint)


def start_from(path: Path) -> None:
    module = Lit()
    load_weights(module, path, list(module.state_dict()))


def convert(path: Path) -> None:
    convert_checkpoint(path, path.with_name("converted"))


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a checkpoint of each kind, which the tests damage and mend again."""
    folder = tmp_path_factory.mktemp("good")
    module = Lit()
    optimizer = torch.optim.Adam(module.parameters())
    module.layer(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    checkpoint = {
        "state_dict": module.state_dict(),
        "optimizer_states": [optimizer.state_dict()],
        "lr_schedulers": [],
        "hyper_parameters": {"width": 3},
        "pytorch-lightning_version": L.__version__,
    }
    torch.save(checkpoint, folder / "x.ckpt")
    torch.save(module.state_dict(), folder / "old.bin", _use_new_zipfile_serialization=False)
    save_file(module.state_dict(), folder / "x.safetensors")
    convert_checkpoint(folder / "x.ckpt", folder / "folder")
    return folder


FILES: list[tuple[str, str, Callable[[Path], None]]] = [
    ("x.ckpt", "x.ckpt", load),
    ("x.ckpt", "x.ckpt", start_from),
    ("x.ckpt", "x.ckpt", convert),
    ("old.bin", "old.bin", start_from),
    ("x.safetensors", "x.safetensors", start_from),
    ("folder", "folder/meta.pt", load),
    ("folder", "folder/.metadata", load),
    ("folder", "folder/.metadata", start_from),
    ("folder", "folder/__0_0.distcp", load),
    ("folder", "folder/__0_0.distcp", convert),
]


@pytest.mark.parametrize(("path", "file", "read"), FILES, ids=[f"{f[1]}-{f[2].__name__}" for f in FILES])
@given(st.data())
def test_damaged_files(path: str, file: str, read: Callable[[Path], None], good: Path, data: st.DataObject) -> None:
    content = (good / file).read_bytes()
    (good / file).write_bytes(data.draw(damaged(content)))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch, about what it makes of damaged pickles
            # Another shape is told by a ValueError of weights; a name that is another one, as missing.
            errors = (CheckpointError, ValueError) if read is start_from else (CheckpointError,)
            taken(lambda: read(good / path), *errors, words=str(good))
    finally:
        (good / file).write_bytes(content)


# -- metadata -------------------------------------------------------------------------------------------------------

CLASSES = ("Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata", "TensorProperties")
NAMES = [f"torch.distributed.checkpoint.metadata\n{name}" for name in CLASSES]
NAMES += ["torch\nSize", "torch\nfloat32", "torch\nload", "os\nsystem", "builtins\neval"]
SCRAPS = st.one_of(
    st.sampled_from([getattr(pickle, name) for name in _OPCODES]),
    st.sampled_from([f"c{name}\n".encode() for name in NAMES]),
    st.sampled_from(
        [b"\x8c\x01a", b"K\x01", b"K\xff", b"q\x01", b"h\x01", b"r\xff\xff\xff\x7f", b")\x81", b")R", b"}b"]
    ),
    st.binary(max_size=4),
)


@given(st.lists(SCRAPS, max_size=20).map(lambda scraps: b"\x80\x04" + b"".join(scraps) + b"."))
def test_pickles_in_place_of_metadata(tmp_path: Path, content: bytes) -> None:
    (tmp_path / ".metadata").write_bytes(content)
    assert taken(lambda: read_metadata(tmp_path, ""), CheckpointError, words=str(tmp_path)) is None


PARTS = ("state_dict_metadata", "planner_data", "storage_data", "storage_meta", "version")


@given(st.data())
def test_metadata_with_other_values(good: Path, data: st.DataObject) -> None:
    file = good / "folder" / ".metadata"
    content = file.read_bytes()
    metadata = pickle.loads(content)
    entry = data.draw(st.sampled_from(sorted(metadata.state_dict_metadata)))
    tensor = metadata.state_dict_metadata[entry]
    place = next(place for index, place in metadata.storage_data.items() if index.fqn == entry)
    things = [metadata, tensor, tensor.properties, tensor.chunks[0], place]
    for _ in range(data.draw(st.integers(1, 3))):
        thing = data.draw(st.sampled_from(things))
        name = data.draw(st.sampled_from(sorted(vars(thing).keys() - {"memory_format"})))  # pickled by torch's own code
        sizes = st.lists(st.integers(-1, 2**62), max_size=3).map(torch.Size)
        vars(thing)[name] = data.draw(st.one_of(VALUES, sizes, st.integers(0, 5000), st.sampled_from(things)))
    try:
        file.write_bytes(pickle.dumps(metadata))
        taken(lambda: load(file.parent), CheckpointError, words=str(good))
    finally:
        file.write_bytes(content)


@given(st.data())
def test_meta_files_with_other_values(good: Path, data: st.DataObject) -> None:
    file = good / "folder" / "meta.pt"
    content = file.read_bytes()
    try:
        torch.save(data.draw(mutated(torch.load(file, weights_only=True), VALUES)), file)
        taken(lambda: load(file.parent), CheckpointError, words=str(good))
    finally:
        file.write_bytes(content)


@given(st.data())
def test_checkpoints_with_other_values(good: Path, data: st.DataObject) -> None:
    file = good / "x.ckpt"
    content = file.read_bytes()
    try:
        torch.save(data.draw(mutated(torch.load(file, weights_only=True), VALUES)), file)
        taken(lambda: load(file), CheckpointError, words=str(good))
        taken(lambda: convert(file), CheckpointError, words=str(good))
    finally:
        file.write_bytes(content)
