"""Streams between two ends in this process, and how ranks connect theirs."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from lightning_pipeline.runtime.connecting import connect
from lightning_pipeline.runtime.errors import PipelineTimeoutError, is_broken_connection, is_late
from lightning_pipeline.runtime.store import BoundedStore
from lightning_pipeline.runtime.streams import _HEADER, LARGE, Stream
from tests.launching import SOON_S

SOON = timedelta(seconds=SOON_S)
A_MOMENT = timedelta(seconds=0.3)
SIZES = (0, 1, 15, 16, 1000, 1 << 14, 1 << 16, LARGE - 1, LARGE, 30_000_000)


@pytest.fixture
def ends() -> Iterator[tuple[Stream, Stream]]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        other, _ = listener.accept()
    streams = Stream(one), Stream(other)
    yield streams
    for stream in streams:
        stream.close()


def contents(size: int, seed: int = 0) -> bytes:
    pattern = bytes((seed + i) % 251 for i in range(251))
    return (pattern * (size // len(pattern) + 1))[:size]


def received(stream: Stream, size: int | None, tag: int = 0) -> bytes:
    message = stream.receive(None if size is None else memoryview(bytearray(size)), tag)
    message.wait(SOON)
    assert message.is_completed()
    return bytes(message.data)


def test_messages_of_all_sizes_go_both_ways_at_once(ends: tuple[Stream, Stream]) -> None:
    sent = [contents(size, seed) for seed, size in enumerate(SIZES)]
    underway = [end.send(data) for end in ends for data in sent]  # nobody reads yet, and no send waits
    for end in ends:
        expected = [end.receive(memoryview(bytearray(len(data)))) for data in sent]
        for message, data in zip(expected, sent, strict=True):
            message.wait(SOON)
            assert message.data == data
    for departing in underway:
        departing.wait(SOON)
        assert departing.is_completed()


def test_bytes_of_an_unknown_number(ends: tuple[Stream, Stream]) -> None:
    for size in SIZES:
        ends[0].send(contents(size))
    assert all(received(ends[1], None) == contents(size) for size in SIZES)


@pytest.mark.parametrize("size", [3, LARGE])
def test_tags_are_received_in_any_order(ends: tuple[Stream, Stream], size: int) -> None:
    for tag in (1, 2, 2, 3):
        ends[0].send(contents(size, tag), tag)
    assert received(ends[1], size, tag=3) == contents(size, 3)
    early = ends[1].receive(memoryview(bytearray(size)), 2)
    assert early.is_completed()  # it came while the third was waited for
    assert received(ends[1], size, tag=1) == contents(size, 1)
    assert received(ends[1], None, tag=2) == contents(size, 2)
    assert not ends[1]._expected and not ends[1]._early


def test_a_large_message_arrives_before_it_is_waited_for(ends: tuple[Stream, Stream]) -> None:
    data = contents(SIZES[-1])
    arriving = ends[1].receive(memoryview(bytearray(len(data))))
    ends[0].send(data).wait(SOON)  # more than the system keeps
    deadline = time.monotonic() + SOON_S
    while not arriving.is_completed() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert arriving.is_completed() and arriving.data == data


def test_threads_that_wait_for_different_messages_get_their_own(ends: tuple[Stream, Stream]) -> None:
    with ThreadPoolExecutor(8) as pool:
        futures = [pool.submit(received, ends[1], 8, tag) for tag in range(8)]
        for tag in reversed(range(8)):
            ends[0].send(contents(8, tag), tag)
            time.sleep(0.01)
        assert [future.result(SOON_S) for future in futures] == [contents(8, tag) for tag in range(8)]


def test_threads_that_send_at_once_do_not_mix_their_messages(ends: tuple[Stream, Stream]) -> None:
    size, number = 3_000_000, 6
    with ThreadPoolExecutor(4) as pool:
        for tag in range(4):
            pool.submit(lambda tag: [ends[0].send(contents(size, tag), tag) for _ in range(number)], tag)
        for _ in range(number):
            for tag in range(4):
                assert received(ends[1], size, tag) == contents(size, tag)


def test_a_shorter_message_fills_the_beginning(ends: tuple[Stream, Stream]) -> None:
    ends[0].send(b"abc")
    assert received(ends[1], 5) == b"abc\0\0"


def test_a_longer_message_is_an_error(ends: tuple[Stream, Stream]) -> None:
    ends[0].send(b"abcdef")
    with pytest.raises(RuntimeError, match="a message of 6 bytes came where 5 were expected"):
        received(ends[1], 5)


def test_so_is_one_that_came_early(ends: tuple[Stream, Stream]) -> None:
    ends[0].send(b"abcdef", 1)
    ends[0].send(b"x", 2)
    assert received(ends[1], 1, tag=2) == b"x"
    with pytest.raises(RuntimeError, match="a message of 6 bytes came where 5 were expected"):
        received(ends[1], 5, tag=1)


def test_nothing_is_read_after_an_interrupted_message(ends: tuple[Stream, Stream]) -> None:
    ends[0]._connection.sendall(_HEADER.pack(0, 8) + b"half")
    earlier = signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    try:
        with pytest.raises(KeyboardInterrupt):
            received(ends[1], 8)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, earlier)
    with pytest.raises(RuntimeError, match="interrupted by KeyboardInterrupt"):
        received(ends[1], 8)


def test_what_comes_slowly_is_not_late(ends: tuple[Stream, Stream]) -> None:
    arriving = ends[1].receive(memoryview(bytearray(LARGE)))

    def trickle() -> None:
        ends[0]._connection.sendall(_HEADER.pack(0, LARGE))
        for _ in range(4):
            time.sleep(A_MOMENT.total_seconds() / 2)
            ends[0]._connection.sendall(bytes(LARGE // 4))

    with ThreadPoolExecutor(1) as pool:
        pool.submit(trickle)
        arriving.wait(A_MOMENT)
    assert arriving.is_completed()


def waits(stream: Stream, how: str, errors: list[RuntimeError]) -> None:
    try:
        if how == "receive":
            received(stream, 8)
        elif how == "large receive":
            received(stream, 2 * LARGE)
        else:
            stream.send(bytes(SIZES[-1])).wait(SOON)
    except RuntimeError as error:
        errors.append(error)


@pytest.mark.parametrize("closes", [0, 1], ids=["the peer closes", "this end closes"])
@pytest.mark.parametrize("how", ["receive", "large receive", "send"])
def test_closing_wakes_who_waits(ends: tuple[Stream, Stream], how: str, closes: int) -> None:
    errors: list[RuntimeError] = []
    thread = threading.Thread(target=waits, args=(ends[1], how, errors))
    thread.start()
    time.sleep(0.1)
    ends[closes].close()
    thread.join(SOON_S)
    assert not thread.is_alive() and is_broken_connection(errors[0])
    with pytest.raises(RuntimeError, match="connection closed"):
        for _ in range(3):  # the first may yet go into a buffer of the system
            ends[1].send(b"x")
            received(ends[1], 1)


def test_what_was_sent_before_closing_arrives(ends: tuple[Stream, Stream]) -> None:
    ends[1].send(b"unread")
    ends[0].send(b"last words")
    ends[0].close()
    assert received(ends[1], None) == b"last words"


def test_a_fork_holds_no_connection_open(ends: tuple[Stream, Stream]) -> None:
    """The workers of a loader may outlive a rank that was killed."""
    child = os.fork()
    if child == 0:
        time.sleep(SOON_S)
        os._exit(0)
    try:
        ends[0]._connection.close()  # as the system does
        began = time.monotonic()
        with pytest.raises(RuntimeError, match="connection closed"):
            ends[1].receive(None).wait(SOON)
        assert time.monotonic() - began < SOON_S / 2
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


@pytest.mark.parametrize("how", ["receive", "large receive", "send"])
def test_a_wait_ends(ends: tuple[Stream, Stream], how: str) -> None:
    messages: dict[str, Callable[[], Any]] = {
        "receive": lambda: ends[0].receive(memoryview(bytearray(8))),
        "large receive": lambda: ends[0].receive(memoryview(bytearray(2 * LARGE))),
        "send": lambda: ends[0].send(bytes(SIZES[-1])),
    }
    message = messages[how]()
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="timed out") as caught:
        message.wait(A_MOMENT)
    assert is_late(caught.value) and time.monotonic() - began < SOON_S


# -- connecting --------------------------------------------------------------------------------------------------------


def connected(store: dist.Store, rank: int, world: int, *, timeout: timedelta = SOON) -> dict[tuple[int, int], Stream]:
    """Two streams to each other rank."""
    wanted = {(peer, number) for peer in range(world) if peer != rank for number in (7, -1)}
    bounded = BoundedStore(store, rank=rank, limit=timeout)
    return connect(bounded, rank, wanted, timeout, lambda: None)


def test_each_pair_has_the_streams_that_both_want() -> None:
    store = dist.HashStore()
    with ThreadPoolExecutor(3) as pool:
        for _ in range(2):  # and again, in the same store
            ranks = [pool.submit(connected, store, rank, 3) for rank in range(3)]
            streams = [rank.result(SOON_S) for rank in ranks]
            for rank, own in enumerate(streams):
                assert sorted(own) == sorted((peer, number) for peer in range(3) if peer != rank for number in (7, -1))
                for (peer, number), stream in own.items():
                    stream.send(f"{rank} {peer} {number}".encode())
            for rank, own in enumerate(streams):
                for (peer, number), stream in own.items():
                    assert received(stream, None) == f"{peer} {rank} {number}".encode()
            for own in streams:
                for stream in own.values():
                    stream.close()


@pytest.mark.parametrize("greeting", [b"", b"GET / HTTP/1.1\r\n", bytes(100)], ids=["nothing", "little", "no token"])
def test_strangers_are_turned_away(greeting: bytes) -> None:
    store = dist.HashStore()
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(connected, store, 0, 2)
        store.wait(["pipeline_streams/1/0"], SOON)
        address, port, _ = json.loads(store.get("pipeline_streams/1/0"))
        with socket.create_connection((address, port)) as stranger:
            with contextlib.suppress(OSError):  # it may have been turned away by now
                stranger.sendall(greeting)
                stranger.shutdown(socket.SHUT_WR)
            streams = [pool.submit(connected, store, 1, 2).result(SOON_S), first.result(SOON_S)]
            with contextlib.suppress(ConnectionResetError):
                assert stranger.recv(1) == b""
    streams[0][0, 7].send(b"hello")
    assert received(streams[1][1, 7], None) == b"hello"
    for own in streams:
        for stream in own.values():
            stream.close()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_does_not_come_is_named(rank: int) -> None:
    with pytest.raises(PipelineTimeoutError, match=rf"rank {rank} waited 0\.3 s for rank {1 - rank} to connect"):
        connected(dist.HashStore(), rank, 2, timeout=A_MOMENT)


def test_a_rank_that_cannot_be_reached_is_named() -> None:
    store = dist.HashStore()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    store.set("pipeline_streams/1/0", json.dumps(["127.0.0.1", port, "00" * 16]))
    with pytest.raises(RuntimeError, match=rf"does not reach rank 0 at 127\.0\.0\.1, port {port} .*SOCKET_IFNAME"):
        connected(store, 1, 2)


def test_an_interface_without_an_address_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no_such")
    with pytest.raises(ValueError, match="GLOO_SOCKET_IFNAME=no_such is no interface with an address"):
        connected(dist.HashStore(), 0, 2)
