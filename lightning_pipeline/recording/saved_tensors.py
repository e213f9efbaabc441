"""Tensors that autograd has saved for backward, sent to host memory and fetched back.

Memory travels whole: what several operations have saved, or views of it, goes once::

    relu's result  --- Saved --.
    its transpose  --- Saved ---+-- Block -- memory on the device | pinned host memory
    linear's input --- Saved --'
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node

from lightning_pipeline import _torch
from lightning_pipeline.partition.memory import memory_of
from lightning_pipeline.recording.recomputation import Frame, Place, Saved

SMALLEST = 1 << 14
"""Bytes below which memory stays on the device: a copy of less takes longer to begin than to make."""


class HostMemory:
    """Copies of a device's memory in the host's, pinned, each way on a stream of its own beside the computation.

    Of the CPU, whose memory is the host's, copies are made at once: the same path without streams.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._out = self._back = None
        if device.type != "cpu":
            self._out, self._back = torch.Stream(device), torch.Stream(device)

    def send(self, memory: Tensor) -> tuple[Tensor, torch.Event | None]:
        """Begin a copy to host memory. Returns it, and the event of its end."""
        host = torch.empty(len(memory), dtype=torch.uint8, pin_memory=self._out is not None)
        return host, self._copy(host, memory, self._out, None)

    def fetch(self, host: Tensor, sent: torch.Event | None) -> tuple[Tensor, torch.Event | None]:
        """Begin a copy back. Returns it, and the event of its end."""
        memory = torch.empty(len(host), dtype=torch.uint8, device=self._device)
        return memory, self._copy(memory, host, self._back, sent)

    def wait(self, event: torch.Event | None) -> None:
        """Let what the device computes from here on wait for the end of a copy. This rank's Python does not wait."""
        if event is not None:
            torch.accelerator.current_stream(self._device).wait_event(event)

    def _copy(
        self, to: Tensor, source: Tensor, stream: torch.Stream | None, after: torch.Event | None
    ) -> torch.Event | None:
        if stream is None:
            to.copy_(source)
            return None
        # What is sent may still be computed, and the memory that is fetched into may still be read by its user before.
        stream.wait_stream(torch.accelerator.current_stream(self._device))
        if after is not None:
            stream.wait_event(after)
        with stream:
            to.copy_(source, non_blocking=True)
            return stream.record_event()


class Block:
    """The memory of saved tensors, which goes to host memory and comes back.

    It is freed only at `let_go` on the device, and until then read there: the copy out need not be waited for.
    """

    __slots__ = ("_event", "_host", "_host_memory", "_memory")

    def __init__(self, memory: Tensor, host_memory: HostMemory) -> None:
        self._host_memory = host_memory
        self._memory: Tensor | None = memory
        host, self._event = host_memory.send(memory)
        self._host: Tensor | None = host

    def let_go(self) -> None:
        """Free the memory on the device, from the end of the copy on."""
        self._host_memory.wait(self._event)
        self._memory = None

    def fetch(self) -> torch.UntypedStorage:
        """Begin to copy it back. Returns the memory, which `on_device` waits for."""
        assert self._host is not None
        self._memory, self._event = self._host_memory.fetch(self._host, self._event)
        return self._memory.untyped_storage()

    def on_device(self) -> torch.UntypedStorage:
        """The memory on the device, fetched now if nobody has done so."""
        if self._memory is None:
            self.fetch()
        assert self._memory is not None
        if self._host is not None:
            self._host_memory.wait(self._event)
        return self._memory.untyped_storage()

    def arrive(self) -> None:
        """Wait for the copy back, and drop the one in host memory."""
        self.on_device()
        self._host = None


class _Entry(Saved):
    """A saved tensor whose memory is a block."""

    __slots__ = ("_block", "_counter", "_dtype", "_place", "_version")

    def __init__(self, tensor: Tensor, block: Block) -> None:
        self._block: Block | None = block
        self._dtype, self._place = tensor.dtype, (tensor.storage_offset(), tensor.shape, tensor.stride())
        # Autograd checks no versions of what has hooks. This shares the tensor's counter, and not its memory.
        self._counter = tensor.detach()
        self._counter.data = tensor.new_empty(0)
        self._version = tensor._version

    def get(self) -> Tensor:
        if self._counter._version != self._version:
            raise RuntimeError(
                f"one of the variables needed for gradient computation has been modified by an inplace operation: a "
                f"tensor of shape {tuple(self._place[1])}, sent to host memory by offload_activations, is at version "
                f"{self._counter._version}; expected version {self._version} instead"
            )
        if self._block is None:
            raise RuntimeError("trying to run backward a second time, after saved tensors were freed")
        memory = self._block.on_device()
        return torch.empty(0, dtype=self._dtype, device=memory.device).set_(memory, *self._place)

    def let_go(self) -> None:
        self._block = None


class SavedMemory:
    """What an autograd graph has saved, by memory.

    Args:
        held: memory (`memory_of`) that somebody else keeps, so that sending it would free nothing.

    Attributes:
        sizes: bytes of each memory that the graph alone keeps, and that can be sent.
        refs: whether each still is there, and those of what cannot be sent, such as DTensors.
        staying: bytes of the latter.
    """

    def __init__(self, roots: Iterable[Node], held: Collection[int]) -> None:
        self._users: dict[int, list[tuple[Any, Tensor]]] = defaultdict(list)
        staying: dict[int, torch.UntypedStorage] = {}
        kept = set(held)
        for owner, tensor in _saved_by(roots):
            is_plain = type(tensor) in _PLAIN and tensor.layout is torch.strided and not tensor.is_quantized
            if owner is None or not is_plain or tensor.is_conj() or tensor.is_neg():
                for part in parts_of(tensor):
                    memory = memory_of(part)
                    if memory >= 0 and memory not in kept:
                        staying[memory] = part.untyped_storage()
            else:
                self._users[memory_of(tensor)].append((owner, tensor))
        for memory in kept.union(staying):
            self._users.pop(memory, None)
        storages = {memory: users[0][1].untyped_storage() for memory, users in self._users.items()}
        self.sizes = {memory: storage.nbytes() for memory, storage in storages.items()}
        self.staying = {memory: storage.nbytes() for memory, storage in staying.items()}
        self.refs = {memory: _torch.StorageWeakRef(one) for memory, one in (*storages.items(), *staying.items())}

    def send(self, share: float, host_memory: HostMemory) -> dict[int, Block]:
        """Send the largest, up to a share of all bytes. Returns the blocks, by memory.

        The tensors are on the device until each block is told to let go.
        """
        left = share * sum(self.sizes.values())
        blocks: dict[int, Block] = {}
        for memory, size in sorted(self.sizes.items(), key=lambda item: -item[1]):
            if size < SMALLEST or size > left:
                continue
            left -= size
            users = self._users.pop(memory)
            whole = torch.empty(0, dtype=torch.uint8, device=users[0][1].device).set_(users[0][1].untyped_storage())
            blocks[memory] = Block(whole, host_memory)
            for owner, tensor in users:
                entry = _Entry(tensor, blocks[memory])
                if isinstance(owner, Frame):
                    owner.put_away(tensor, entry)
                else:
                    owner.register_hooks(lambda _, entry=entry: entry, _Entry.get)
        self._users.clear()  # it would keep what is freed
        return blocks


_PLAIN = (Tensor, torch.nn.Parameter)


def memories_of(tensor: Tensor) -> Iterator[int]:
    """The memory of a tensor (`memory_of`), or of what its subclass wraps, such as a DTensor's slice."""
    return map(memory_of, parts_of(tensor))


def parts_of(tensor: Tensor) -> Iterator[Tensor]:
    """A tensor, or those that its subclass wraps."""
    if hasattr(tensor, "__tensor_flatten__"):
        for part in (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]):
            if isinstance(part, Tensor):  # and no mesh
                yield from parts_of(part)
    else:
        yield tensor


def _saved_by(roots: Iterable[Node]) -> Iterator[tuple[Any, Tensor]]:
    """Every tensor that a graph has saved, with what it can be replaced in; None where it cannot be."""
    stack, seen = list(roots), set()
    frames: set[Frame] = set()
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        stack += [child for child, _ in node.next_functions if child is not None]
        for raw_name, name in saved_names(type(node)):
            try:
                raws = getattr(node, raw_name)
            except RuntimeError:  # freed
                continue
            raws = raws if isinstance(raws, (list, tuple)) else (raws,)
            packed = [raw.data for raw in raws]
            frames.update(one.frame for one in packed if isinstance(one, Place) and one.frame is not None)
            if not any(isinstance(one, Tensor) for one in packed):
                continue
            try:
                # With their own version counters. It raises where one was modified, as autograd will in backward.
                tensors = getattr(node, name) if all(raw.unpack_hook is None for raw in raws) else None
            except RuntimeError:
                tensors = None
            if tensors is None:
                yield from ((None, one) for one in packed if isinstance(one, Tensor))
                continue
            tensors = tensors if isinstance(tensors, (list, tuple)) else (tensors,)
            yield from ((raw, one) for raw, one in zip(raws, tensors, strict=True) if isinstance(one, Tensor))
    for frame in frames:
        yield from ((frame, tensor) for tensor in frame.inputs())


@cache
def saved_names(kind: type[Node]) -> tuple[tuple[str, str], ...]:
    """The attributes under which nodes of a type have what they saved, as it is and as a tensor."""
    raw = [name for name in dir(kind) if name.startswith("_raw_saved_")]
    return tuple((name, own if hasattr(kind, own := name.removeprefix("_raw")) else own[1:]) for name in raw)
