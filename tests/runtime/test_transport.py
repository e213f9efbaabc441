"""Tensors and objects between real processes."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_pipeline.planning.calibration import measure_link
from lightning_pipeline.runtime.tensor_meta import TensorMeta
from lightning_pipeline.runtime.topology import Channel, Topology
from lightning_pipeline.runtime.transport import Transport
from tests.launching import PATIENCE_S, launch

TIMEOUT = timedelta(seconds=PATIENCE_S)
FORWARD, BACKWARD, BATCH = Channel.FORWARD, Channel.BACKWARD, Channel.BATCH


def run(body: Callable[[Transport], None], *, stages: int, replicas: int = 1, **options: Any) -> None:
    """Run `body` on every rank of a grid; an error of any rank fails the test."""
    launch(_run, body, stages, options, world=stages * replicas)


def _run(body: Callable[[Transport], None], stages: int, options: dict[str, Any]) -> None:
    rank, world = int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"])
    backend = options.pop("backend", "gloo")
    if backend != "gloo":
        register_backend(backend)
    dist.init_process_group(backend, rank=rank, world_size=world, timeout=TIMEOUT)
    topology = Topology(num_ranks_per_pipeline=stages, world_size=world, rank=rank).along(options.get("placement", ()))
    store = dist.distributed_c10d._get_default_store()
    transport = Transport(topology, torch.device("cpu"), TIMEOUT, store)
    try:
        body(transport)
    except BaseException as error:
        transport.notice.fail(error)
        raise
    transport.close()


def register_backend(name: str) -> None:
    """A backend that is not Gloo by name, with Gloo inside: what the transport does for NCCL and HCCL runs on it."""

    def create(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
        return dist.ProcessGroupGloo(store, rank, size, timeout)

    dist.Backend.register_backend(name, create, devices=["cpu"])


def examples() -> list[Tensor]:
    """Tensors of many kinds, the same on every rank."""
    generator = torch.Generator().manual_seed(1)
    image = torch.randn(2, 3, 4, 5, generator=generator)
    values = [
        image,
        torch.tensor(3.5),
        torch.randn(0, 4, generator=generator),
        image > 0,
        image.bfloat16(),
        image.half(),
        image.double(),
        (image * 9).to(torch.int16),
        (image * 9).long(),
        image.to(torch.float8_e4m3fn),
        torch.complex(image, image + 1),
        torch.complex(image, image + 1).conj(),
        torch.complex(image, image + 1).conj().imag,
        torch.tensor(1 + 2j),
        image.to(memory_format=torch.channels_last),
        image.permute(3, 1, 0, 2),
        image.permute(3, 1, 0, 2).to(torch.complex128),
        image[1:, :],  # dense with an offset
        image[:, ::2],  # not dense
        image[:, :, 0, :1].expand(2, 3, 7),
        image.transpose(0, 1)[:, :, 1:],
        torch.nn.Parameter(image.clone()) * 2,
    ]
    return [*values, torch.randn(300_000, generator=generator)]


def check_equal(received: Tensor, sent: Tensor) -> None:
    assert received.dtype == sent.dtype
    assert not received.requires_grad
    assert received.stride() == TensorMeta.of(sent).stride
    same = received.float().equal(sent.float()) if "float8" in str(sent.dtype) else received.equal(sent)
    assert same, f"{sent.dtype} {tuple(sent.shape)} {sent.stride()} arrived changed"


def exchange(transport: Transport) -> None:
    """Every kind of tensor up, its mirror down at once; then many underway; then objects and vectors."""
    stage, last = transport.stage, transport.topology.num_stages - 1
    metas = [TensorMeta.of(tensor) for tensor in examples()]
    ups = [transport.recv(meta, stage - 1, FORWARD) for meta in metas] if stage > 0 else []
    downs = [transport.recv(meta, stage + 1, BACKWARD) for meta in metas] if stage < last else []
    for tensor in examples():
        if stage < last:
            transport.send(tensor, stage + 1, FORWARD)
        if stage > 0:
            transport.send(tensor, stage - 1, BACKWARD)
    for pending in (ups, downs):
        for handle, sent in zip(pending, examples(), strict=False):
            check_equal(handle.wait("an example"), sent)
            check_equal(handle.wait("an example"), sent)  # waiting twice is harmless
    transport.flush()
    assert not transport.receives
    assert not any(link.underway for link in transport._outgoing.values())


def many_underway(transport: Transport) -> None:
    """Batch tensors do not wait for their receivers, and channels do not wait for one another."""
    peer = 1 - transport.stage
    meta = TensorMeta((1000,), (1,), torch.int64)
    if transport.stage == 0:
        for i in range(200):
            transport.send(torch.full((1000,), i), peer, BATCH)
        transport.send(torch.full((1000,), -1), peer, FORWARD)
        assert transport.recv(meta, peer, BACKWARD).wait("the reply").eq(-2).all()
    else:  # in the opposite order
        assert transport.recv(meta, peer, FORWARD).wait("the first").eq(-1).all()
        transport.send(torch.full((1000,), -2), peer, BACKWARD)
        handles = [transport.recv(meta, peer, BATCH) for _ in range(200)]
        assert all(handle.wait("a batch").eq(i).all() for i, handle in enumerate(handles))
    transport.flush()


def both_send_more_than_the_system_keeps(transport: Transport) -> None:
    """Receives are posted, and waited for once all is sent: sends that wait for room must not wait for one another."""
    peer = 1 - transport.stage
    there, back = (FORWARD, BACKWARD) if transport.stage == 0 else (BACKWARD, FORWARD)
    meta = TensorMeta((750_000,), (1,), torch.float32)
    pending = [transport.recv(meta, peer, back) for _ in range(16)]
    for i in range(16):
        transport.send(torch.full(meta.shape, float(i)), peer, there)
    assert all(receive.wait("a tensor").eq(i).all() for i, receive in enumerate(pending))
    transport.flush()


def a_wait_does_not_keep_others_from_sending(transport: Transport) -> None:
    """What is waited for is sent once more than the system keeps has left on another stream."""
    meta = TensorMeta((750_000,), (1,), torch.float32)
    if transport.stage == 0:
        for i in range(16):
            transport.send(torch.full(meta.shape, float(i)), 1, FORWARD)
        transport.send_object("done", 1)
        transport.flush()
    else:
        pending = [transport.recv(meta, 0, FORWARD) for _ in range(16)]
        assert transport.recv_object(0, "the end") == "done"
        assert all(receive.wait("a tensor").eq(i).all() for i, receive in enumerate(pending))


def tensors_can_be_resized(transport: Transport) -> None:
    """What was sent or received is as any other tensor."""
    peer = 1 - transport.stage
    tensor = torch.ones(4)
    transport.send_on_control(tensor, peer)
    received = transport.receive_on_control(torch.zeros(4), peer, "a tensor")
    assert received.resize_(100).numel() == tensor.resize_(100).numel() == 100


def sends_hold_little_memory(transport: Transport) -> None:
    """A sender keeps at most the send window alive, with no flush."""
    peer = 1 - transport.stage
    meta = TensorMeta((10,), (1,), torch.float32)
    if transport.stage == 0:
        for i in range(50):
            transport.send(torch.full((10,), float(i)), peer, FORWARD)
            assert len(transport._outgoing[FORWARD, peer].underway) <= 4
    else:
        for i in range(50):
            assert transport.recv(meta, peer, FORWARD).wait("a tensor")[0] == i
    transport.flush()


def objects_and_vectors(transport: Transport) -> None:
    stage, stages = transport.stage, transport.topology.num_stages
    for peer in range(stages):
        if peer != stage:
            transport.send_object({"from": stage, "to": peer, "payload": bytes(100_000)}, peer)
            transport.send_object(None, peer)
    for peer in range(stages):
        if peer != stage:
            assert transport.recv_object(peer, "a dict") == {"from": peer, "to": stage, "payload": bytes(100_000)}
            assert transport.recv_object(peer, "nothing") is None
    for source in range(stages):
        assert transport.broadcast_object((stage, "x"), source, "a tuple") == (source, "x")
    for repeat in range(3):
        values = torch.tensor([stage + 0.1, repeat], dtype=torch.float64)
        gathered = transport.all_gather_vector(values, "norms")
        values.zero_()
        assert gathered.tolist() == [[other + 0.1, repeat] for other in range(stages)]
    transport.barrier("everyone")


def speed_of_the_link(transport: Transport) -> None:
    link = measure_link(transport, transport.device)
    assert (link is None) == (transport.stage > 0)
    if link is not None:
        assert 0 < link.message < 0.05 and 0 <= link.latency < 5  # a value each way; a busy machine may take its time
        assert 1e6 < link.bytes_per_second < 1e16
        assert 0 < link.byte < 1e-6  # a core copies a gigabyte in some tenths of a second


def two_stages(transport: Transport) -> None:
    speed_of_the_link(transport)
    exchange(transport)
    many_underway(transport)
    both_send_more_than_the_system_keeps(transport)
    a_wait_does_not_keep_others_from_sending(transport)
    tensors_can_be_resized(transport)
    sends_hold_little_memory(transport)
    objects_and_vectors(transport)


def three_stages(transport: Transport) -> None:
    exchange(transport)
    objects_and_vectors(transport)


def replicas_stay_apart(transport: Transport) -> None:
    replica, peer = transport.topology.replica, 1 - transport.stage
    assert transport.pipeline_ranks == [replica, replica + 2]
    transport.send_object(replica, peer)
    assert transport.recv_object(peer, "the replica") == replica


def another_backend(transport: Transport) -> None:
    """Warm-up connected all routes, loops included."""
    exchange(transport)
    peer = 1 - transport.stage
    meta = TensorMeta((4,), (1,), torch.float32)
    pending = transport.recv(meta, peer, FORWARD)  # both ways on one channel, receives first
    transport.send(torch.full((4,), float(transport.stage)), peer, FORWARD)
    assert pending.wait("the loop").eq(peer).all()
    transport.flush()
    assert dist.get_backend(transport._groups[0]) == "other"


@pytest.mark.multiprocess
def test_two_stages() -> None:
    run(two_stages, stages=2)


@pytest.mark.multiprocess
def test_three_stages() -> None:
    run(three_stages, stages=3)


@pytest.mark.multiprocess
def test_replicas() -> None:
    run(replicas_stay_apart, stages=2, replicas=2)


@pytest.mark.multiprocess
def test_backend_other_than_gloo() -> None:
    run(another_backend, stages=2, backend="other", placement=[0, 1, 0, 1])  # which makes routes in a loop


def test_one_process_needs_nothing() -> None:
    topology = Topology(num_ranks_per_pipeline=1, world_size=1, rank=0)
    transport = Transport(topology, torch.device("cpu"), TIMEOUT, None)
    assert transport.broadcast_object("x", 0, "x") == "x"
    assert transport.all_gather_vector(torch.ones(2), "norms").tolist() == [[1.0, 1.0]]
    transport.barrier("nobody")
    transport.flush()
    transport.notice.fail(ValueError("fine"))
    transport.close()


@pytest.mark.parametrize("tensor", examples(), ids=lambda t: f"{t.dtype}-{tuple(t.shape)}-{t.stride()}")
def test_meta_keeps_dense_strides(tensor: Tensor) -> None:
    meta = TensorMeta.of(tensor)
    dense = torch.ops.aten.is_non_overlapping_and_dense(tensor)
    assert meta.stride == (tensor.stride() if dense else tensor.contiguous().stride())
    assert meta == pickle.loads(pickle.dumps(meta))
    assert hash(meta) == hash(TensorMeta.of(tensor))
