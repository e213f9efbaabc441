"""Calls in hooks on parameters that ranks keep in slices: on the whole ones, into which writes go back.

A view, such as `parameter.data`, shares its memory with the whole that was gathered for its call, and not with the
slices. Such a *window* looks at the slices again when they have changed, and gives them what is written into it.

    slices (DTensor)  --gather-->  whole  <--same memory-->  window
                      <--write---         <--a call writes into either
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from lightning_pipeline import _torch
from lightning_pipeline.engine.fully_sharded import is_sharded
from lightning_pipeline.engine.slices import GatheredMemory, part_from_views, whole, write
from lightning_pipeline.hooks.operands import WINDOW_OF, TensorKeys
from lightning_pipeline.partition import tree
from lightning_pipeline.partition.kept_parameters import KeptParameter, is_of_fsdp2, leave
from lightning_pipeline.partition.memory import memory_of, tensors_in_memory_of
from lightning_pipeline.partition.overrides import overridden
from lightning_pipeline.partition.ownership import holders_of, note_holders
from lightning_pipeline.partition.placeholder import Placeholder, TensorSpec, is_absent, placeholder
from lightning_pipeline.partition.torch_functions import FunctionKind, kind_of
from lightning_pipeline.partition.users_code import in_hook, users_line


def on_whole_tensors(
    run: Callable[[Any, Any, Any, Any], Any], func: Any, args: Any, kwargs: dict[str, Any], name: str
) -> Any:
    """Run a call on whole tensors in place of sharded ones, and copy what it writes back into these.

    All ranks must call it. Those whose stage does not hold a tensor that tensor parallelism has split run it on a
    placeholder.
    """
    gathered: dict[int, tuple[DTensor, Tensor, int]] = {}

    def gather(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, DTensor):
            return tensor
        if id(tensor) not in gathered:
            found: Tensor
            if is_absent(tensor):
                found = placeholder(TensorSpec.of(tensor).but(is_parameter=False), name)
            else:
                found = whole(tensor).requires_grad_(tensor.requires_grad)
            note_holders(found, holders_of(tensor))
            gathered[id(tensor)] = tensor, found, found._version
        return gathered[id(tensor)][1]

    with _by_the_package():
        given = tree.replace((args, kwargs), gather)
    result = run(func, (), *given)
    with _by_the_package(), torch.no_grad():
        here = [item for item in gathered.values() if not is_absent(item[0])]
        for part, found, version in here:
            if found._version > version:
                write(part, found)
        slices = {id(found): part for part, found, _ in gathered.values()}
        made = [one for one in tree.leaves(result) if id(one) not in slices]
        _note_windows(made, [GatheredMemory([(part, found)]) for part, found, _ in here])
        return tree.replace(result, lambda one: slices.get(id(one), one))


def windows_among(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Those of a call's operands that are windows."""
    return [tensor for tensor in tensors if WINDOW_OF in tensor.__dict__]


def on_windows(run: Callable[[], Any], windows: list[Tensor]) -> Any:
    """Run a call some of whose operands are windows. All ranks that hold the slices must call it."""
    all_gathered = list({id(one): one for one in (window.__dict__[WINDOW_OF] for window in windows)}.values())
    with _by_the_package(), torch.no_grad():
        for gathered in all_gathered:
            gathered.refresh()
    versions = [window._version for window in windows]
    result = run()
    with _by_the_package(), torch.no_grad():
        for window, version in zip(windows, versions, strict=True):
            if window._version > version:
                window.__dict__[WINDOW_OF].write_back()
        _note_windows(tree.leaves(result), all_gathered)
    return result


def deep_copy(keys: TensorKeys, tensor: Tensor, memo: dict[int, Any]) -> Any:
    """`TensorKeys.copy`, where a copy of slices is whole, and one of a window has its own memory. All ranks must call
    it."""
    if is_sharded(tensor) and tensor.device_mesh.ndim == 1 and id(tensor) not in memo:  # type: ignore[attr-defined]
        with _by_the_package():
            found = whole(tensor)
        copied = nn.Parameter(found, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else found
        memo[id(tensor)] = keys.note(copied, holders_of(tensor))
        return memo[id(tensor)]
    if windows := windows_among([tensor]):
        return on_windows(lambda: keys.copy(tensor, memo), windows)
    return keys.copy(tensor, memo)


def leave_behind(sharded: Mapping[nn.Parameter, nn.Parameter]) -> list[GatheredMemory]:
    """Let what the user's code has kept of parameters, and of views of them, mean their slices.

    Args:
        sharded: by the parameter, whose memory is freed, what the module has in its place now.

    Returns:
        The memory of views, for steps, which use them as they are.
    """
    views = tensors_in_memory_of([*sharded])
    parts: dict[int, list[tuple[DTensor, Tensor]]] = {memory: [] for memory in views}
    for parameter, slices in sharded.items():
        if (memory := memory_of(parameter)) in views:
            parts[memory].append((slices, parameter.detach()))  # type: ignore[arg-type]
        leave(parameter, slices)
    all_gathered = [GatheredMemory(parts[memory]) for memory in views]
    for gathered, windows in zip(all_gathered, views.values(), strict=True):
        for window in windows:
            window.__dict__[WINDOW_OF] = gathered
            note_holders(window, holders_of(gathered.parts[0][0]))
    return all_gathered


def leave_views(gathered: Mapping[Tensor, Tensor]) -> list[GatheredMemory]:
    """Give views of gathered parameters that the user's code has kept memory of their own, before that of the
    parameters is freed. They go on to show the slices.

    Args:
        gathered: by the slices, what they are gathered into.
    """
    views = {slices: _given_own_memory(parameter) for slices, parameter in gathered.items()}
    kept = {slices: GatheredMemory([(slices, memory)]) for slices, (memory, users) in views.items() if users}  # type: ignore[list-item]
    for slices, one in kept.items():
        for window in views[slices][1]:
            window.__dict__[WINDOW_OF] = one
            note_holders(window, holders_of(slices))
    return [*kept.values()]


def set_data_of_gathered(parameter: Tensor, slices: Tensor, data: Tensor) -> None:
    """``parameter.data = data`` for what slices are gathered into, whose memory is FSDP2's."""
    with _by_the_package(), torch.no_grad():
        part_from_views(slices, is_gathered=True)
        _given_own_memory(parameter)
        parameter.copy_(data)


def _given_own_memory(parameter: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Give the user's views of a gathered parameter a copy of its memory. Returns that and them."""
    with _torch.DisableTorchFunction(), torch.no_grad():
        found = tensors_in_memory_of([parameter]).get(memory_of(parameter), [])
        users = [one for one in found if not is_of_fsdp2(one)]
        memory = parameter.detach().clone() if users else parameter
        for one in users:
            one.data = memory.as_strided(one.shape, one.stride(), one.storage_offset())
    return memory, users


@contextmanager
def gathered_by_hooks() -> Iterator[None]:
    """While entered, what a hook gathers by itself, as code for FSDP2 does, is known to be of some stages alone."""
    plain = DTensor.full_tensor

    def full_tensor(tensor: DTensor, **options: Any) -> Tensor:
        return whole_with_holders(tensor) if in_hook.is_here() else plain(tensor, **options)

    with overridden() as override:
        override(DTensor, "full_tensor", full_tensor)
        yield


class SlicesRefused(TorchFunctionMode):
    """While entered, code of a loader computes with nothing that ranks keep in slices: replicas fetch by themselves."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        are_slices = any(isinstance(one, (DTensor, KeptParameter)) for one in tree.leaves((args, kwargs)))
        if are_slices and kind_of(func) is not FunctionKind.DESCRIBES:
            refuse_slices(users_line())
        return func(*args, **kwargs)


def refuse_slices(line: str) -> NoReturn:
    """Raise for code of a loader, in a line of the user's, that computes with slices."""
    raise NotImplementedError(
        f"a loader computes with a parameter of which replicas keep slices ({line}), and each replica fetches its "
        f"batches by itself: compute it in training_step or a hook, or use data_parallel='zero1'"
    )


def refuse_window_of_first_rank(tensors: Iterable[Tensor], name: str, *, writes: bool) -> None:
    """Check that code that the first rank alone runs does not need other ranks for a window."""
    if any(writes or not window.__dict__[WINDOW_OF].is_fresh for window in windows_among(tensors)):
        raise NotImplementedError(
            f"{name} uses a view, such as .data, of a parameter that ranks keep in slices and that has changed, or "
            f"changes it, in code that the first rank alone runs ({users_line()}): let every rank run it"
        )


def set_data_of_slices(parameter: DTensor, data: Tensor) -> None:
    """``parameter.data = data``, which is whole, for a parameter of which ranks keep slices."""
    if parameter.shape != data.shape:
        raise NotImplementedError(
            f"the shape of a parameter that ranks keep in slices changes from {tuple(parameter.shape)} to "
            f"{tuple(data.shape)} ({users_line()}): use data_parallel='zero1'"
        )
    with _by_the_package():
        part_from_views(parameter)
        write(parameter, data)


def whole_with_holders(tensor: Tensor) -> Tensor:
    """The whole of what ranks keep in slices, with the same holders; any other tensor itself."""
    if not isinstance(tensor, DTensor):
        return tensor
    with _by_the_package():
        found = whole(tensor)
    note_holders(found, holders_of(tensor))
    return found


def _note_windows(made: Iterable[Any], all_gathered: Iterable[GatheredMemory]) -> None:
    """Note which of the tensors that a call has made share the memory of what was gathered."""
    by_memory = {one.parts[0][1].untyped_storage().data_ptr(): one for one in all_gathered if one.parts}
    for tensor in made:
        if type(tensor) is Placeholder or tensor.layout is not torch.strided or not tensor.numel():
            continue
        if (gathered := by_memory.get(tensor.untyped_storage().data_ptr())) is not None:
            tensor.__dict__[WINDOW_OF] = gathered


@contextmanager
def _by_the_package() -> Iterator[None]:
    """While entered, nothing counts as the user's: torch asks for the rank where it puts slices together."""
    before, in_hook.on = in_hook.on, False
    try:
        with _torch.DisableTorchFunction():
            yield
    finally:
        in_hook.on = before
