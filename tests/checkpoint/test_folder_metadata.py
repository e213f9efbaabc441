"""A checkpoint folder runs no code and reads no other files, whatever its `.metadata` says."""

from __future__ import annotations

import copyreg
import os
import pickle
import re
import shutil
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
)
from typer.testing import CliRunner

from lightning_pipeline.checkpoint.folder import convert_checkpoint, read_folder, replace_stored
from lightning_pipeline.checkpoint.folder_metadata import MAX_BYTES, read_metadata
from lightning_pipeline.checkpoint.shards import ShardFiles
from lightning_pipeline.checkpoint.torch_files import CheckpointError
from lightning_pipeline.checkpoint.weights import load_weights
from lightning_pipeline.cli import app
from tests.memory_limit import little_memory

NAME = "state_dict.weight"
STATE = nn.Linear(3, 2).state_dict()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint of one layer."""
    torch.save({"state_dict": STATE, "pytorch-lightning_version": "2.6"}, tmp_path / "plain.ckpt")
    convert_checkpoint(tmp_path / "plain.ckpt", tmp_path / "folder.ckpt")
    return tmp_path / "folder.ckpt"


def metadata_of(folder: Path) -> Metadata:
    return pickle.loads((folder / ".metadata").read_bytes())


def write(folder: Path, metadata: Any) -> None:
    (folder / ".metadata").write_bytes(metadata if isinstance(metadata, bytes) else pickle.dumps(metadata))


def load_as_weights(folder: Path) -> None:
    load_weights(nn.Linear(3, 2), folder, ["weight", "bias"])


def convert(folder: Path) -> None:
    result = CliRunner().invoke(app, ["checkpoint", "convert", str(folder), str(folder.with_name("out.ckpt"))])
    assert result.exit_code in (0, 2), result.exception
    if result.exit_code:
        raise CheckpointError(result.output)


def load_into_memory(folder: Path) -> None:
    replace_stored(read_folder(folder))


READERS: list[Callable[[Path], Any]] = [load_into_memory, load_as_weights, convert, ShardFiles]


# -- what torch writes is read --------------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_it_reads_what_torch_writes(protocol: int, tmp_path: Path) -> None:
    dtypes = [torch.float64, torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.int8, torch.uint16, torch.bool]
    state = {str(dtype): torch.ones(2, 3).to(dtype) for dtype in dtypes}
    state |= {"scalar": torch.tensor(1.0), "none": torch.zeros(0), "number": 3, "nested": {"a": [torch.ones(1), "b"]}}
    state |= {"wide": torch.ones(1, 2, 3, 3).to(memory_format=torch.channels_last)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    expected = metadata_of(tmp_path)
    write(tmp_path, pickle.dumps(expected, protocol=protocol))
    assert read_metadata(tmp_path, "") == expected
    files = ShardFiles(tmp_path)
    for dtype in dtypes:
        assert torch.equal(files.tensor(str(dtype)).read().to(torch.complex128), torch.ones(2, 3) + 0j)


@pytest.mark.parametrize("name", ["pathlib\nPosixPath", "pathlib\nWindowsPath", "pathlib._local\nPosixPath"])
def test_it_reads_what_was_written_on_other_systems(name: str, folder: Path) -> None:
    text = pickle.dumps(metadata_of(folder), protocol=2)  # names every class in a line of its own
    text, count = re.subn(rb"cpathlib(\._local)?\nPosixPath\n", f"c{name}\n".encode(), text)
    assert count == 1
    write(folder, text)
    assert read_metadata(folder, "").state_dict_metadata.keys() == {NAME, "state_dict.bias"}


# -- code -----------------------------------------------------------------------------------------------------------


class Runs:
    """Makes a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def in_planner_data(metadata: Metadata, mark: Path) -> Any:
    return replace(metadata, planner_data=Runs(mark))


def in_its_place(metadata: Metadata, mark: Path) -> Any:
    return Runs(mark)


def as_a_size(metadata: Metadata, mark: Path) -> Any:
    metadata.state_dict_metadata[NAME].size = Runs(mark)  # type: ignore[assignment, union-attr]
    return metadata


def by_text(metadata: Metadata, mark: Path) -> bytes:
    return f"cos\nsystem\n(S'touch {mark}'\ntR.".encode()


def by_a_dotted_name(metadata: Metadata, mark: Path) -> bytes:
    name = b"os.system"
    call = f"touch {mark}".encode()
    module = b"torch"
    texts = [b"\x8c" + bytes([len(text)]) + text for text in (module, name, call)]
    return b"\x80\x04" + texts[0] + texts[1] + b"\x93" + texts[2] + b"\x85R."


def by_an_extension(metadata: Metadata, mark: Path) -> bytes:
    return b"\x80\x02\x82\xf0X" + len(str(mark)).to_bytes(4, "little") + str(mark).encode() + b"\x85R."


def by_attributes_of_a_class(metadata: Metadata, mark: Path) -> bytes:
    """BUILD with a state of two parts sets attributes, here of a class: every tensor's entry would be one of bytes."""
    text = b"torch.distributed.checkpoint.metadata"
    one = b"c" + text + b"\nTensorStorageMetadata\n"
    return b"\x80\x02" + one + b"N}X\x04\x00\x00\x00sizeX\x01\x00\x00\x00xs\x86b."


@pytest.fixture
def extension() -> Any:
    """A function that a program has given a number of pickle's, and has used already."""
    copyreg.add_extension("pathlib", "Path.touch", 240)
    copyreg._extension_cache[240] = lambda path: Path(path).touch()  # type: ignore[attr-defined]
    yield
    copyreg.remove_extension("pathlib", "Path.touch", 240)
    copyreg._extension_cache.pop(240, None)  # type: ignore[attr-defined]


@pytest.mark.parametrize("read", READERS, ids=lambda reader: reader.__name__)
@pytest.mark.parametrize(
    ("attack", "words"),
    [
        (in_planner_data, "names posix.mkdir, which is none of the classes of torch.distributed.checkpoint's"),
        (in_its_place, "names posix.mkdir"),
        (as_a_size, "names posix.mkdir"),
        (by_text, "is damaged"),
        (by_a_dotted_name, "names torch.os.system"),
        (by_an_extension, "is damaged"),
        (by_attributes_of_a_class, "is damaged: UnpicklingError: a type has no state"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_no_code_runs(attack: Any, words: str, read: Any, folder: Path, tmp_path: Path, extension: Any) -> None:
    write(folder, attack(metadata_of(folder), tmp_path / "mark"))
    with pytest.raises(CheckpointError) as error:
        read(folder)
    message = " ".join(str(error.value).split())
    assert words in message and str(folder / ".metadata") in message
    assert not (tmp_path / "mark").exists()


def test_the_way_out_is_named(folder: Path, tmp_path: Path) -> None:
    write(folder, in_planner_data(metadata_of(folder), tmp_path / "mark"))
    for read, words in (
        (load_into_memory, "fit weights_only=False"),
        (load_as_weights, "dcp_to_torch_save(folder, other)"),
        (convert, "--no-weights-only"),
    ):
        with pytest.raises(CheckpointError) as error:
            read(folder)
        assert words in str(error.value)


def test_no_code_runs_in_place_of_a_tensor(folder: Path, tmp_path: Path) -> None:
    """torch unpickles what is no tensor freely, and decides by the class of the entry."""
    metadata = metadata_of(folder)
    torch.save({"weight": Runs(tmp_path / "mark")}, folder / "code.distcp")
    entry = BytesStorageMetadata()
    vars(entry).update(vars(metadata.state_dict_metadata[NAME]))
    metadata.state_dict_metadata[NAME] = entry
    place = next(iter(metadata.storage_data.values()))
    code = replace(place, relative_path="code.distcp", offset=0, length=(folder / "code.distcp").stat().st_size)
    metadata.storage_data[MetadataIndex(NAME)] = code
    write(folder, metadata)
    for read in (load_into_memory, convert):
        with pytest.raises(CheckpointError, match="has no tensor"):
            read(folder)
    assert load_weights(nn.Linear(3, 2), folder, ["weight", "bias"]) == {"bias"}
    assert not (tmp_path / "mark").exists()


def test_no_code_runs_from_a_shard(folder: Path, tmp_path: Path) -> None:
    metadata = metadata_of(folder)
    for index, place in metadata.storage_data.items():
        torch.save(Runs(tmp_path / "mark"), folder / "code.distcp")
        size = (folder / "code.distcp").stat().st_size
        metadata.storage_data[index] = replace(place, relative_path="code.distcp", offset=0, length=size)
    write(folder, metadata)
    for read in (load_into_memory, load_as_weights, convert):
        with pytest.raises(CheckpointError) as error:
            read(folder)
        message = " ".join(str(error.value).split())
        assert "from code.distcp: holds posix.mkdir in its place. It is damaged" in message
        assert "weights_only" not in message
    assert not (tmp_path / "mark").exists()


def test_a_folder_that_is_trusted_is_read_as_torch_reads_it(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(folder, in_planner_data(metadata_of(folder), tmp_path / "mark"))
    assert torch.equal(read_folder(folder, weights_only=False)["state_dict"]["weight"].read(), STATE["weight"])
    assert (tmp_path / "mark").exists()
    (tmp_path / "mark").rmdir()
    result = CliRunner().invoke(
        app, ["checkpoint", "convert", str(folder), str(tmp_path / "out.ckpt"), "--no-weights-only"]
    )
    assert result.exit_code == 0 and (tmp_path / "mark").exists(), result.output
    (tmp_path / "mark").rmdir()
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    with pytest.warns(UserWarning, match="TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"):
        read_folder(folder)
    monkeypatch.delenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD")
    monkeypatch.setenv("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "1")
    with pytest.raises(CheckpointError, match=r"names posix\.mkdir"):
        read_folder(folder, weights_only=False)


# -- other files ----------------------------------------------------------------------------------------------------


def elsewhere(folder: Path, name: str) -> None:
    """Let the metadata find a tensor in another file, which is there and is whole."""
    metadata = metadata_of(folder)
    for index, place in metadata.storage_data.items():
        metadata.storage_data[index] = replace(place, relative_path=name)
    write(folder, metadata)


@pytest.fixture
def shard(folder: Path, tmp_path: Path) -> Path:
    """The folder's shard, outside of it."""
    return Path(shutil.move(folder / "__0_0.distcp", tmp_path / "secret.distcp"))


@pytest.mark.parametrize(
    "name", ["../secret.distcp", "sub/../../secret.distcp", "{shard}", "link", "sub/link", "away/secret.distcp"]
)
def test_only_files_of_the_folder_are_read(name: str, folder: Path, shard: Path) -> None:
    (folder / "sub").mkdir()
    (folder / "link").symlink_to(shard)
    (folder / "sub" / "link").symlink_to("../../secret.distcp")
    (folder / "away").symlink_to(shard.parent)
    elsewhere(folder, name.format(shard=shard))
    for read in READERS:
        with pytest.raises(CheckpointError, match=r"which is not in it: its \.metadata is damaged, or made to read"):
            read(folder)
    assert torch.equal(read_folder(folder, weights_only=False)["state_dict"]["weight"].read(), STATE["weight"])


@pytest.mark.parametrize("name", ["", "\0", "..", "C:\\x", "..\\x", "\\\\server\\x", "/dev/zero", "ring", "x" * 300])
def test_names_of_other_systems_are_refused_too(name: str, folder: Path) -> None:
    (folder / "ring").symlink_to("ring")
    elsewhere(folder, name)
    # Since Python 3.13 a ring of links leads to a file that is not there.
    with pytest.raises(CheckpointError, match="which is not in it" + "|its file ring is missing" * (name == "ring")):
        read_folder(folder)


def test_the_cache_of_hugging_face_is_read(folder: Path, tmp_path: Path) -> None:
    """Its folders hold links to files that lie side by side elsewhere."""
    blobs = tmp_path / "models--x" / "blobs"
    snapshot = tmp_path / "models--x" / "snapshots" / "1"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, path in enumerate(sorted(folder.iterdir())):
        shutil.copy(path, blobs / str(number))
        (snapshot / path.name).symlink_to(f"../../blobs/{number}")
    assert load_weights(nn.Linear(3, 2), snapshot, ["weight", "bias"]) == {"weight", "bias"}


def test_files_in_folders_of_the_folder_are_read(folder: Path) -> None:
    (folder / "sub").mkdir()
    shutil.move(folder / "__0_0.distcp", folder / "sub" / "0.distcp")
    elsewhere(folder, "sub/0.distcp")
    assert load_weights(nn.Linear(3, 2), folder, ["weight", "bias"]) == {"weight", "bias"}


# -- damage ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content",
    [
        b"\x80\x02Nr\xff\xff\xff\x7f.",
        b"\x80\x05\x96\0\0\0\0\0\1\0\0.",
        b"\x80\x04X\xff\xff\xff\xffx.",
        b"\x80\x02\x8b\xff\xff\xff\x7f.",
    ],
    ids=["memo", "bytearray", "text", "number"],
)
def test_numbers_in_it_take_no_memory(content: bytes, folder: Path) -> None:
    """The first is what one flipped bit makes of a call, and has pickle take 32 GB."""
    write(folder, content)
    with little_memory(), pytest.raises(CheckpointError, match="is damaged"):
        read_metadata(folder, "")


def test_tuples_in_tuples_are_no_keys(folder: Path) -> None:
    write(folder, b"\x80\x02})" + b"q\x00h\x00\x86" * 60 + b"Ns.")
    with pytest.raises(CheckpointError, match="is damaged: UnpicklingError: a key that is a tuple"):
        read_metadata(folder, "")


def test_a_device_is_read_no_further_than_metadata_may_go(folder: Path) -> None:
    (folder / ".metadata").unlink()
    (folder / ".metadata").symlink_to("/dev/zero")
    with pytest.raises(CheckpointError, match=f"has more than {MAX_BYTES:,} bytes"):
        read_metadata(folder, "")


def changed(metadata: Metadata, what: str) -> Any:
    others = {
        "nothing": None,
        "a list": [],
        "no entries": replace(metadata, state_dict_metadata=None),
        "no places": replace(metadata, storage_data=None),
    }
    if what in others:
        return others[what]
    entry: Any = metadata.state_dict_metadata[NAME]
    index = next(index for index in metadata.storage_data if index.fqn == NAME)
    place = metadata.storage_data[index]

    def chunk(offsets: tuple[int, ...], sizes: tuple[int, ...]) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))

    entries: dict[str, dict[str, Any]] = {
        "no shape": {"size": (2, 3)},
        "another shape": {"size": torch.Size((4, 3))},
        "no chunks": {"chunks": []},
        "a chunk": {"chunks": [chunk((0, 1), (2, 3))]},
        "a flat chunk": {"chunks": [chunk((0,), (6,))]},
        "a far chunk": {"chunks": [*entry.chunks, chunk((1, 0), (1, 3))]},
        "below zero": {"size": torch.Size((0, -1)), "chunks": []},
        "dimensions": {"size": torch.Size([1] * 100)},
        "a dtype": {"properties": replace(entry.properties, dtype="float32")},
        "properties": {"properties": None},
        "huge": {"size": torch.Size((2**40, 2**20)), "chunks": [chunk((0, 0), (2**40, 2**20))]},
    }
    places: dict[str, dict[str, Any]] = {
        "too little": {"length": 20},
        "an offset": {"offset": -1},
        "a name": {"relative_path": 3},
        "a form": {"transform_descriptors": [3]},
    }
    if what in entries:
        metadata.state_dict_metadata[NAME] = replace(entry, **entries[what])
    elif what in places:
        metadata.storage_data[index] = replace(place, **places[what])
    elif what == "an entry":
        metadata.state_dict_metadata[NAME] = place
    else:
        metadata.state_dict_metadata["other"] = entry
    return metadata


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("nothing", "it holds a NoneType"),
        ("a list", "it holds a list"),
        ("no entries", "it has no entries"),
        ("no places", "it has no entries"),
        ("an entry", "state_dict.weight is a _StorageInfo"),
        ("no shape", "has no shape and dtype of a tensor"),
        ("another shape", "has 12 elements and chunks of 6"),
        ("no chunks", "has 6 elements and chunks of 0"),
        ("a chunk", r"has the shape \(2, 3\) and a chunk of \(2, 3\) at \(0, 1\)"),
        ("a flat chunk", "has a chunk without a shape of its own"),
        ("a far chunk", r"has a chunk at \(1, 0\) that is in no file"),
        ("below zero", "has no shape and dtype of a tensor"),
        ("dimensions", "has no shape and dtype of a tensor"),
        ("a dtype", "has no shape and dtype of a tensor"),
        ("properties", "AttributeError"),
        ("too little", "has a chunk of 24 bytes in 20"),
        ("an offset", "without a range of bytes"),
        ("a name", "without a name"),
        ("a form", "in an unknown form"),
        ("another name", r"other has a chunk at \(0, 0\) that is in no file"),
        ("huge", "bytes in"),
    ],
)
def test_what_does_not_add_up_is_damage(what: str, words: str, folder: Path) -> None:
    write(folder, changed(metadata_of(folder), what))
    with little_memory(), pytest.raises(CheckpointError, match=rf"\.metadata is damaged: .*{words}"):
        read_folder(folder)


def test_properties_of_old_versions_are_known(folder: Path) -> None:
    from torch.distributed._shard.sharded_tensor.metadata import TensorProperties as Old

    metadata = metadata_of(folder)
    for entry in metadata.state_dict_metadata.values():
        assert isinstance(entry.properties, TensorProperties)  # type: ignore[union-attr]
        entry.properties = Old(dtype=torch.float32)  # type: ignore[union-attr, assignment]
    write(folder, metadata)
    assert load_weights(nn.Linear(3, 2), folder, ["weight", "bias"]) == {"weight", "bias"}


def test_another_shape_in_the_other_file_is_told(folder: Path) -> None:
    meta = torch.load(folder / "meta.pt", weights_only=True)
    meta["checkpoint"]["state_dict"]["weight"] = torch.empty(3, 2, device="meta")
    torch.save(meta, folder / "meta.pt")
    with pytest.raises(
        CheckpointError, match=r"state_dict.weight is \(3, 2\) of torch.float32 by its meta.pt, and \(2, 3\)"
    ):
        read_folder(folder)


@pytest.mark.parametrize("key", ["checkpoint", "sections", "parameter_names"])
def test_parts_that_are_not_there_are_damage(key: str, folder: Path) -> None:
    meta = torch.load(folder / "meta.pt", weights_only=True)
    for value in (None, 3, ["absent"]):
        torch.save({**meta, key: value}, folder / "meta.pt")
        with pytest.raises(CheckpointError, match=r"meta\.pt is damaged"):
            read_folder(folder)
