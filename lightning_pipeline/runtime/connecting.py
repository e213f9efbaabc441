"""How the ranks of a pipeline find each other, and connect their streams."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import struct
import time
from collections.abc import Callable, Iterable, Set
from datetime import timedelta

from lightning_pipeline.runtime.errors import PipelineTimeoutError, ranks
from lightning_pipeline.runtime.store import BoundedStore
from lightning_pipeline.runtime.streams import Stream, timeval

_HELLO = struct.Struct("<16sqq")  # token, rank and number of the stream
_GREETING = timedelta(seconds=5)
"""How long a rank has to say who it is, once it is connected."""
_SIOCGIFADDR = 0x8915
_WAY_OUT = "set GLOO_SOCKET_IFNAME to the network interface by which machines reach one another"


def connect(
    store: BoundedStore, rank: int, wanted: Iterable[tuple[int, int]], timeout: timedelta, look: Callable[[], object]
) -> dict[tuple[int, int], Stream]:
    """Streams to other ranks, by (rank, number). Both ends want the same numbers, and all ranks call it equally often.

    A rank listens until it is connected, where Gloo listens as well: at the address of ``GLOO_SOCKET_IFNAME``, else at
    that of its host's name, else at the loopback address. Those of higher ranks connect to it.

    Args:
        look: called now and then while other ranks are waited for; may raise.

    Raises:
        PipelineTimeoutError: a rank did not come in time.
        RuntimeError: a rank cannot be reached.
        ValueError: ``GLOO_SOCKET_IFNAME`` names no interface with an address.
    """
    wanted = set(wanted)
    place = f"pipeline_streams/{store.add(f'pipeline_streams/rank{rank}', 1)}"
    deadline = time.monotonic() + timeout.total_seconds()
    with _listener(len(wanted)) as listener, contextlib.ExitStack() as opened:
        token = secrets.token_bytes(16)
        address, port = listener.getsockname()[:2]
        store.set(f"{place}/{rank}", json.dumps([address, port, token.hex()]))
        lower = sorted({peer for peer, _ in wanted if peer < rank})
        if lower and not store.wait_looking([f"{place}/{peer}" for peer in lower], timeout, look):
            raise _missing(rank, [peer for peer in lower if not store.check(f"{place}/{peer}")], timeout)
        told = {peer: json.loads(store.get(f"{place}/{peer}")) for peer in lower}
        sockets: dict[tuple[int, int], socket.socket] = {}
        for peer, number in sorted(wanted):
            if peer < rank:
                try:
                    one = _reached(told[peer], rank, number, max(1.0, deadline - time.monotonic()))
                except OSError as error:
                    look()  # it may have failed
                    address, port, _ = told[peer]
                    raise RuntimeError(
                        f"rank {rank} does not reach rank {peer} at {address}, port {port} ({error}): {_WAY_OUT}"
                    ) from None
                sockets[peer, number] = opened.enter_context(one)
        while missing := wanted - sockets.keys():
            if time.monotonic() > deadline:
                raise _missing(rank, sorted({peer for peer, _ in missing}), timeout)
            look()
            if (accepted := _accepted(listener, token, missing)) is not None:
                sockets[accepted[0]] = opened.enter_context(accepted[1])
        opened.pop_all()
    return {key: Stream(one) for key, one in sockets.items()}


def _reached(told: tuple[str, int, str], rank: int, number: int, seconds: float) -> socket.socket:
    """A connection to a rank that listens, which has been told what it is for."""
    address, port, token = told
    with contextlib.ExitStack() as opened:
        one = opened.enter_context(socket.create_connection((address, port), seconds))
        one.sendall(_HELLO.pack(bytes.fromhex(token), rank, number))
        opened.pop_all()
    return one


def _accepted(
    listener: socket.socket, token: bytes, missing: Set[tuple[int, int]]
) -> tuple[tuple[int, int], socket.socket] | None:
    """A connection from another rank, and what it is for; None if nobody came just now, or somebody else did."""
    try:
        one, _ = listener.accept()
    except (TimeoutError, ConnectionError):
        return None
    with contextlib.suppress(OSError, struct.error):
        one.setblocking(True)
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeval(_GREETING))
        found, peer, number = _HELLO.unpack(one.recv(_HELLO.size, socket.MSG_WAITALL))
        if secrets.compare_digest(found, token) and (peer, number) in missing:
            return (peer, number), one
    one.close()
    return None


def _missing(rank: int, peers: list[int], timeout: timedelta) -> PipelineTimeoutError:
    return PipelineTimeoutError(
        f"rank {rank} waited {timeout.total_seconds():g} s for {ranks(peers)} to connect: see what they say, raise the "
        f"strategy's `timeout` if they are slow, or {_WAY_OUT}"
    )


def _listener(backlog: int) -> socket.socket:
    """A socket that listens where Gloo would."""
    for family, address in _own_addresses():
        one = socket.socket(family, socket.SOCK_STREAM)
        try:
            one.bind((address, 0))
            one.listen(max(1, backlog))
            one.settimeout(1.0)
            return one
        except OSError:
            one.close()
    raise RuntimeError(f"this rank can listen at no address of its own: {_WAY_OUT}")


def _own_addresses() -> list[tuple[int, str]]:
    """Addresses to listen at, the best first."""
    name = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
    if name:
        import fcntl  # not on every system

        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            try:
                told = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError as error:
                raise ValueError(f"GLOO_SOCKET_IFNAME={name} is no interface with an address ({error})") from None
        return [(socket.AF_INET, socket.inet_ntoa(told[20:24]))]
    found: list[tuple[int, str]] = []
    with contextlib.suppress(OSError, UnicodeError):
        for family, _, _, _, place in socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM):
            found.append((family, str(place[0])))
    return [*found, (socket.AF_INET, "127.0.0.1")]
