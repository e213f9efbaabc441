"""A checkpoint file is there whole or not at all, is read as far as it is needed, and says what is wrong with it."""

from __future__ import annotations

import errno
import io
import os
import pickle
import re
import sys
import tracemalloc
import zipfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO

from lightning_pipeline import PipelineStrategy
from lightning_pipeline.checkpoint import files
from lightning_pipeline.checkpoint.files import (
    AtomicCheckpointIO,
    CheckpointError,
    read_into_memory,
    remove_leftovers,
    replacing,
)
from tests.file_limit import small_files

MEGABYTE = 1 << 20
needs_proc = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")


def checkpoint(value: float = 0.0, megabytes: int = 8) -> dict[str, Any]:
    return {
        "state_dict": {name: torch.full((megabytes, MEGABYTE // 4), value) for name in ("first", "second")},
        "callbacks": {"best": [{"score": torch.tensor(value)}], "all": (torch.tensor(value),)},
        "pytorch-lightning_version": L.__version__,
    }


def value_of(path: Path) -> float:
    return float(torch.load(path, weights_only=True)["callbacks"]["best"][0]["score"])


# -- writing ------------------------------------------------------------------------------------------------------


def test_a_file_is_written_from_the_tensors_without_a_copy(tmp_path: Path) -> None:
    tracemalloc.start()
    AtomicCheckpointIO().save_checkpoint(checkpoint(1.0), tmp_path / "folder" / "x.ckpt")
    assert tracemalloc.get_traced_memory()[1] < MEGABYTE
    tracemalloc.stop()
    assert [path.name for path in (tmp_path / "folder").iterdir()] == ["x.ckpt"]
    assert value_of(tmp_path / "folder" / "x.ckpt") == 1.0


def test_a_full_disk_is_told_and_the_previous_file_stays(tmp_path: Path) -> None:
    plugin = AtomicCheckpointIO()
    plugin.save_checkpoint(checkpoint(1.0), tmp_path / "x.ckpt")
    size = (tmp_path / "x.ckpt").stat().st_size
    for limit in (0, 1000, 12 * MEGABYTE, size - 10):
        with small_files(limit), pytest.raises(OSError, match="cannot write checkpoint") as raised:
            plugin.save_checkpoint(checkpoint(2.0), tmp_path / "x.ckpt")
        assert raised.value.errno == errno.EFBIG
        message = str(raised.value)
        assert re.search(rf"x\.ckpt: File too large \(it needs {size:,} bytes, .* and [\d,]+ are free\)", message)
        assert message.endswith("; the file that was there is still whole")
        assert [path.name for path in tmp_path.iterdir()] == ["x.ckpt"]
        assert value_of(tmp_path / "x.ckpt") == 1.0
    with small_files(1000), pytest.raises(OSError) as raised:
        plugin.save_checkpoint(checkpoint(2.0), tmp_path / "new" / "x.ckpt")
    assert "still whole" not in str(raised.value)


def test_what_cannot_be_pickled_leaves_the_previous_file(tmp_path: Path) -> None:
    plugin = AtomicCheckpointIO()
    plugin.save_checkpoint(checkpoint(1.0), tmp_path / "x.ckpt")
    with pytest.raises(Exception, match="pickle"):
        plugin.save_checkpoint({**checkpoint(), "hook": lambda: 0}, tmp_path / "x.ckpt")
    assert [path.name for path in tmp_path.iterdir()] == ["x.ckpt"]
    assert value_of(tmp_path / "x.ckpt") == 1.0


def test_what_a_killed_process_left_is_cleaned_up_at_the_next_save(tmp_path: Path) -> None:
    leftover = tmp_path / f"{files.PREFIX}1234{files.SUFFIX}"
    leftover.mkdir()
    (leftover / "lock").touch()
    (leftover / "content").write_bytes(b"half")
    foreign = tmp_path / ".checkpoint-notes"
    foreign.touch()
    with replacing(tmp_path / "one.ckpt") as one:
        assert not leftover.exists()
        with replacing(tmp_path / "two.ckpt") as two:  # takes the first, which is being written, for no leftover
            two.write_bytes(b"2")
        one.write_bytes(b"1")
    assert {path.name for path in tmp_path.iterdir()} == {"one.ckpt", "two.ckpt", foreign.name}


def test_a_draft_that_is_taken_for_a_leftover_at_once_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, calls = files._lock, []

    def late(file: Any) -> bool:
        calls.append(file)
        if len(calls) == 1:
            remove_leftovers(tmp_path)
        return lock(file)

    monkeypatch.setattr(files, "_lock", late)
    with replacing(tmp_path / "x.ckpt") as written:
        written.write_bytes(b"whole")
    assert len(calls) == 2
    assert (tmp_path / "x.ckpt").read_bytes() == b"whole"


@pytest.mark.parametrize("has_swap", [sys.platform == "linux", False])
def test_a_folder_takes_the_place_of_another_or_of_a_file(
    has_swap: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_swap:
        monkeypatch.setattr("ctypes.CDLL", lambda name: object())
    path = tmp_path / "last.ckpt"
    for content in ("one", "two", None, "three"):
        with replacing(path) as written:
            if content is None:
                written.touch()
            else:
                written.mkdir()
                (written / content).touch()
            if has_swap and path.exists():  # then it is there all the time, and nothing else is renamed
                monkeypatch.setattr(Path, "rename", lambda self, target: pytest.fail(f"{self} was renamed"))
        assert path.is_file() if content is None else [item.name for item in path.iterdir()] == [content]
        assert list(tmp_path.iterdir()) == [path]


def test_lightning_takes_no_unfinished_file_for_a_checkpoint(tmp_path: Path) -> None:
    callback = ModelCheckpoint(tmp_path, save_last=True)
    trainer = L.Trainer(default_root_dir=tmp_path, callbacks=[callback], accelerator="cpu", logger=False)
    callback.setup(trainer, L.LightningModule(), "fit")
    (tmp_path / "hpc_ckpt_2.ckpt").touch()
    (tmp_path / "last.ckpt").touch()
    with replacing(tmp_path / "hpc_ckpt_3.ckpt") as hpc, replacing(tmp_path / "last-v1.ckpt") as last:
        hpc.touch()
        last.touch()
        assert len(list(tmp_path.iterdir())) == 4
        assert callback._find_last_checkpoints(trainer) == {str(tmp_path / "last.ckpt")}
        assert trainer._checkpoint_connector._hpc_resume_path == str(tmp_path / "hpc_ckpt_2.ckpt")


def test_other_file_systems_go_lightnings_way(tmp_path: Path) -> None:
    plugin = AtomicCheckpointIO()
    plugin.save_checkpoint(checkpoint(3.0, 1), "memory://folder/x.ckpt")
    assert plugin.load_checkpoint("memory://folder/x.ckpt")["state_dict"]["first"][0, 0] == 3
    plugin.save_checkpoint(checkpoint(4.0, 1), f"file://{tmp_path}/x.ckpt")
    assert value_of(tmp_path / "x.ckpt") == 4.0
    plugin.remove_checkpoint(tmp_path / "x.ckpt")
    assert not list(tmp_path.iterdir())
    with pytest.raises(TypeError, match="storage_options"):
        plugin.save_checkpoint(checkpoint(), tmp_path / "x.ckpt", storage_options={})


# -- beside others --------------------------------------------------------------------------------------------------


def test_the_strategy_takes_it_where_the_user_has_given_none() -> None:
    def strategy(*plugins: Any) -> PipelineStrategy:
        return L.Trainer(strategy=PipelineStrategy(), accelerator="cpu", devices=1, plugins=list(plugins)).strategy

    default = strategy()
    assert type(default.checkpoint_io) is AtomicCheckpointIO and default.checkpoint_io is default.checkpoint_io
    own = TorchCheckpointIO()
    assert strategy(own).checkpoint_io is own
    wrapped = strategy(AsyncCheckpointIO()).checkpoint_io
    assert type(wrapped) is AsyncCheckpointIO and type(wrapped.checkpoint_io) is AtomicCheckpointIO
    assert strategy(AsyncCheckpointIO(own)).checkpoint_io.checkpoint_io is own


def test_a_full_disk_is_told_by_asynchronous_saving_too(tmp_path: Path) -> None:
    plugin = AsyncCheckpointIO(AtomicCheckpointIO())
    plugin.save_checkpoint(checkpoint(1.0), tmp_path / "x.ckpt")
    plugin.teardown()  # waits for the thread
    with small_files(MEGABYTE), pytest.raises(OSError, match="is still whole"):
        plugin.save_checkpoint(checkpoint(2.0), tmp_path / "x.ckpt")
        plugin.teardown()
    assert [path.name for path in tmp_path.iterdir()] == ["x.ckpt"]
    assert value_of(tmp_path / "x.ckpt") == 1.0


# -- reading --------------------------------------------------------------------------------------------------------


def resident(path: Path) -> int | None:
    """Bytes of a mapped file that this process has read; None where it is not mapped."""
    entries = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.MULTILINE)
    sizes = [int(re.search(r"Rss:\s+(\d+)", entry)[1]) * 1024 for entry in entries if f"{path}" in entry]
    return sum(sizes) if sizes else None


@needs_proc
def test_only_what_is_copied_is_read(tmp_path: Path) -> None:
    plugin = AtomicCheckpointIO()
    plugin.save_checkpoint(checkpoint(1.0), tmp_path / "x.ckpt")
    loaded = plugin.load_checkpoint(tmp_path / "x.ckpt")
    assert resident(tmp_path / "x.ckpt") < MEGABYTE
    own = torch.empty(8, MEGABYTE // 4)
    own.copy_(loaded["state_dict"]["first"])
    assert 8 * MEGABYTE <= resident(tmp_path / "x.ckpt") < 9 * MEGABYTE
    read_into_memory(loaded["state_dict"]["second"])
    kept = loaded["callbacks"], loaded["state_dict"].pop("second")
    del loaded
    assert resident(tmp_path / "x.ckpt") is None  # so that a file that is replaced is gone
    assert kept[0]["best"][0]["score"] == kept[0]["all"][0] == kept[1][0, 0] == 1


class Unknown:
    """Something that a file should not need."""


def saved(value: Any, **options: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer, **options)
    return buffer.getvalue()


def damaged(old: bytes, new: bytes) -> bytes:
    """A file whose pickle is another one."""
    content = saved(checkpoint(megabytes=1))
    assert len(old) == len(new) and content.count(old) == 1
    return content.replace(old, new)


def zipped() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("notes", "none of torch's")
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is no checkpoint: it is empty"),
        (b"notes", "is no checkpoint: it starts with b'note', and torch.save's files start with"),
        (saved(checkpoint(megabytes=1))[:-1], r"is cut off after [\d,]{5,} bytes"),
        (saved(checkpoint(megabytes=1))[:5], "is cut off after 5 bytes"),
        (saved(checkpoint(megabytes=1))[1000:], "is no checkpoint: it starts with"),
        (damaged(b"\1\0\0\0PK\5\6", b"\2\0\0\0PK\5\6"), "cannot be read as a checkpoint: RuntimeError"),
        (damaged(b"callbacksq", b"callbacks\0"), "checkpoint: UnpicklingError: Unsupported operand 0. It is damaged"),
        (damaged(b"_rebuild_tensor_v2", b"_rebuild_tensor_v9"), r"objects .* \(torch\._utils\._rebuild_tensor_v9\)"),
        (zipped(), "cannot be read as a checkpoint: RuntimeError"),
        (saved([Unknown(), Path("x")]), r"\(pathlib\..*PosixPath, .*\.Unknown\).*trainer.fit weights_only=False"),
    ],
    ids=["empty", "text", "cut", "cut early", "no start", "disks", "opcode", "name", "zip", "objects"],
)
def test_a_file_that_cannot_be_loaded_says_why(content: bytes, words: str, tmp_path: Path) -> None:
    (tmp_path / "x.ckpt").write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"x\.ckpt.*{words}"):
        AtomicCheckpointIO(weights_only=True).load_checkpoint(tmp_path / "x.ckpt")


@pytest.mark.parametrize(
    ("value", "named"),
    [
        ({"counts": defaultdict(dict)}, "(collections.defaultdict)"),
        ({"counts": defaultdict(list, a=[1]), "hook": Unknown()}, "(collections.defaultdict, "),
        ({"kind": dict, "hook": Unknown()}, "(tests.checkpoint.test_files.Unknown)"),
        ({"kind": dict, "range": slice(1)}, "(builtins.dict, builtins.slice)"),
        ({"call": eval}, "(builtins.eval)"),
    ],
    ids=["factory", "two", "class", "plain", "function"],
)
@pytest.mark.parametrize("is_new", [True, False], ids=["zip", "before torch 1.6"])
def test_what_is_refused_is_named_and_nothing_else(value: Any, named: str, is_new: bool, tmp_path: Path) -> None:
    """A file names the class dict, too, where a defaultdict has it as its factory."""
    (tmp_path / "x.ckpt").write_bytes(saved(value, _use_new_zipfile_serialization=is_new))
    with pytest.raises(CheckpointError) as error:
        AtomicCheckpointIO(weights_only=True).load_checkpoint(tmp_path / "x.ckpt")
    message = str(error.value)
    assert "holds objects that torch does not load from any file (" in message
    if is_new:  # of older ones torch tells the first that it comes to
        assert named in message
    assert ("dict" not in message.replace("defaultdict", "")) or "builtins.dict" in named or not is_new


@pytest.mark.parametrize("has_checksums", [True, False])
def test_a_number_that_has_changed_is_told_where_the_file_has_checksums(has_checksums: bool, tmp_path: Path) -> None:
    path = tmp_path / "x.ckpt"
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(has_checksums)
    try:
        torch.save({"epoch": 70, "weight": torch.ones(4)}, path)
    finally:
        torch.serialization.set_crc32_options(before)
    assert AtomicCheckpointIO().load_checkpoint(path)["epoch"] == 70
    data = bytearray(path.read_bytes())
    data[data.index(b"KF") + 1] ^= 1  # 70, as pickle has it
    path.write_bytes(data)
    if has_checksums:
        with pytest.raises(CheckpointError, match=r"Bad CRC-32 for file '.*data\.pkl'\. It is damaged"):
            AtomicCheckpointIO().load_checkpoint(path)
    else:
        assert AtomicCheckpointIO().load_checkpoint(path)["epoch"] == 71


def test_errors_of_the_system_are_its_own_and_name_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x.ckpt").write_bytes(saved(checkpoint(megabytes=1)))
    for number, kind in ((errno.EIO, OSError), (errno.EACCES, PermissionError), (errno.EINVAL, CheckpointError)):

        def fail(*args: Any, number: int = number, **kwargs: Any) -> Any:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(torch, "load", fail)
        with pytest.raises(kind, match=r"x\.ckpt"):
            AtomicCheckpointIO().load_checkpoint(tmp_path / "x.ckpt")


def test_no_file_and_a_folder_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"x\.ckpt"):
        AtomicCheckpointIO().load_checkpoint(tmp_path / "x.ckpt")
    with pytest.raises(CheckpointError, match="is a folder"):
        AtomicCheckpointIO().load_checkpoint(tmp_path)


def test_objects_are_loaded_from_a_file_that_is_trusted(tmp_path: Path) -> None:
    path = tmp_path / "x.ckpt"
    path.write_bytes(saved({"a": Unknown()}))
    assert isinstance(AtomicCheckpointIO(weights_only=False).load_checkpoint(path)["a"], Unknown)
    assert isinstance(AtomicCheckpointIO().load_checkpoint(path, weights_only=False)["a"], Unknown)
    with pytest.raises(CheckpointError):
        AtomicCheckpointIO(weights_only=False).load_checkpoint(path, weights_only=True)
    with torch.serialization.safe_globals([Unknown]):
        assert isinstance(AtomicCheckpointIO(weights_only=True).load_checkpoint(path)["a"], Unknown)


def test_by_default_it_trusts_what_lightning_trusts(tmp_path: Path) -> None:
    def loads(plugin: TorchCheckpointIO) -> bool:
        try:
            plugin.load_checkpoint(tmp_path / "x.ckpt")
        except (CheckpointError, pickle.UnpicklingError):
            return False
        return True

    (tmp_path / "x.ckpt").write_bytes(saved({"a": Unknown()}))
    assert loads(AtomicCheckpointIO()) == loads(TorchCheckpointIO())


def test_files_of_old_versions_of_torch_load(tmp_path: Path) -> None:
    (tmp_path / "x.ckpt").write_bytes(saved({"a": torch.ones(2)}, _use_new_zipfile_serialization=False))
    assert AtomicCheckpointIO().load_checkpoint(tmp_path / "x.ckpt")["a"].tolist() == [1, 1]
