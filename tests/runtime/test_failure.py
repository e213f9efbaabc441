"""Whatever ends one rank ends all of them within seconds, and all say why."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from lightning_pipeline.runtime import failure
from lightning_pipeline.runtime.failure import Failure, FailureNotice, PeerFailedError, PipelineTimeoutError
from lightning_pipeline.runtime.tensor_meta import TensorMeta
from lightning_pipeline.runtime.topology import Channel, Topology
from lightning_pipeline.runtime.transport import Transport
from tests.launching import PATIENCE_S, PRELOADED, SOON_S, free_port

pytestmark = pytest.mark.multiprocess

META = TensorMeta((4,), (1,), torch.float32)


class Ended(NamedTuple):
    """How a rank ended: its exception, and seconds from the fault to the end of its process."""

    kind: str
    message: str
    cause: str
    seconds: float
    exit_code: int | None


def run(
    body: Callable[[Transport], None], *, stages: int, timeout: float = PATIENCE_S, num_stopped: int = 0
) -> list[Ended]:
    """Run `body` on every stage, until all processes but the stopped ones have ended."""
    port = free_port()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    fault = context.Value("d", 0.0)
    pipes = [context.Pipe(duplex=False) for _ in range(stages)]
    processes = [
        context.Process(target=_process, args=(rank, stages, port, timeout, body, pipes[rank][1], fault), daemon=True)
        for rank in range(stages)
    ]
    for process in processes:
        process.start()
    for _, writer in pipes:
        writer.close()
    ends: dict[int, float] = {}
    deadline = time.monotonic() + PATIENCE_S
    while len(ends) < stages - num_stopped and time.monotonic() < deadline:
        for rank, process in enumerate(processes):
            if rank not in ends and process.exitcode is not None:
                ends[rank] = time.time()
        time.sleep(0.02)
    results = []
    for rank, process in enumerate(processes):
        reader = pipes[rank][0]
        try:
            told = reader.recv() if reader.poll() else ("", "", "")
        except EOFError:
            told = ("", "", "")
        exit_code = process.exitcode
        process.kill()
        results.append(Ended(*told, ends.get(rank, float("inf")) - fault.value, exit_code))
    return results


def _process(
    rank: int, stages: int, port: int, timeout: float, body: Callable[..., None], pipe: Any, fault: Any
) -> None:
    torch.set_num_threads(1)
    address = f"tcp://127.0.0.1:{port}"
    patience = timedelta(seconds=PATIENCE_S)
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=stages, timeout=patience)
    topology = Topology(num_ranks_per_pipeline=stages, world_size=stages, rank=rank)
    store = dist.distributed_c10d._get_default_store()
    transport = Transport(topology, torch.device("cpu"), patience, store)
    transport.barrier("the start")
    transport.flush()
    transport.timeout = timedelta(seconds=timeout)
    if rank == 0:
        fault.value = time.time()
    try:
        body(transport)
    except BaseException as error:
        transport.notice.fail(error)
        failure = getattr(error, "failure", None)
        pipe.send((type(error).__name__, str(error), failure.traceback if failure is not None else ""))
        raise


def relay(transport: Transport, fault: Callable[[], None], *, at: int) -> None:
    """Micro-batches go up and gradients down; stage `at` meets its fault at micro-batch 2."""
    stage, last = transport.stage, transport.topology.num_stages - 1
    for microbatch in range(4):
        if stage > 0:
            transport.recv(META, stage - 1, Channel.FORWARD).wait(f"the activations of micro-batch {microbatch}")
        if stage == at and microbatch == 2:
            fault()
        if stage < last:
            transport.send(torch.zeros(4), stage + 1, Channel.FORWARD)
            transport.recv(META, stage + 1, Channel.BACKWARD).wait(f"the gradients of micro-batch {microbatch}")
        if stage > 0:
            transport.send(torch.zeros(4), stage - 1, Channel.BACKWARD)
    transport.flush()


def _raise() -> None:
    raise ValueError("the loss is not finite")


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def raise_on_first(transport: Transport) -> None:
    relay(transport, _raise, at=0)


def raise_on_last(transport: Transport) -> None:
    relay(transport, _raise, at=transport.topology.num_stages - 1)


def kill_first(transport: Transport) -> None:
    relay(transport, _kill, at=0)


def kill_last(transport: Transport) -> None:
    relay(transport, _kill, at=transport.topology.num_stages - 1)


def stop_first(transport: Transport) -> None:
    relay(transport, _stop, at=0)


def stop_last(transport: Transport) -> None:
    relay(transport, _stop, at=transport.topology.num_stages - 1)


def raise_in_exchange(transport: Transport) -> None:
    """The others are in an exchange of the control group when the last stage fails."""
    if transport.stage == transport.num_stages - 1:
        time.sleep(0.3)
        _raise()
    transport.all_gather_vector(torch.zeros(2), "the norms of the gradients")


def raise_while_peer_sends(transport: Transport) -> None:
    """Stage 0 waits for a full send window, and the failing rank has receives underway."""
    if transport.stage == 0:
        for _ in range(10):
            transport.send(torch.zeros(1_000_000), 1, Channel.FORWARD)
        transport.flush()
    else:
        receives = [transport.recv(META, 0, Channel.BATCH) for _ in range(3)]
        time.sleep(0.3)
        assert not receives, "a fault of its own"


@pytest.mark.parametrize(("body", "culprit", "stages"), [(raise_on_first, 0, 2), (raise_on_last, -1, 3)])
def test_exception_on_one_stage(body: Callable[[Transport], None], culprit: int, stages: int) -> None:
    ended = run(body, stages=stages)
    failed = ended.pop(culprit)
    assert failed[:2] == ("ValueError", "the loss is not finite")
    rank = culprit % stages
    for end in ended:
        assert end.kind == "PeerFailedError"
        assert f"stage {rank} (rank {rank}) failed: ValueError: the loss is not finite" in end.message
        assert 'raise ValueError("the loss is not finite")' in end.cause  # the original traceback
        assert "Traceback" not in end.message
    assert all(end.exit_code == 1 and end.seconds < SOON_S for end in [failed, *ended])


@pytest.mark.parametrize(("body", "culprit", "stages"), [(kill_first, 0, 3), (kill_last, -1, 2)])
def test_killed_process(body: Callable[[Transport], None], culprit: int, stages: int) -> None:
    ended = run(body, stages=stages)
    assert ended.pop(culprit).exit_code == -signal.SIGKILL
    rank = culprit % stages
    neighbour = ended[0 if culprit == 0 else -1]
    assert f"stage {rank} (rank {rank}) failed: its process ended or lost its connection" in neighbour.message
    assert "micro-batch 2" in neighbour.message
    for end in ended:
        assert end.kind == "PeerFailedError"
        assert f"stage {rank} (rank {rank}) failed" in end.message
    assert all(end.exit_code == 1 and end.seconds < SOON_S for end in ended)


def test_stopped_process() -> None:
    def run_until_the_other_ends(body: Callable[[Transport], None]) -> list[Ended]:
        return run(body, stages=2, timeout=3.0, num_stopped=1)

    with ThreadPoolExecutor(2) as threads:  # both at once, as they wait
        runs = threads.map(run_until_the_other_ends, (stop_first, stop_last))
    for stopped, what, ended in zip((0, 1), ("activations", "gradients"), runs, strict=True):
        end = ended[1 - stopped]
        assert end.kind == "PipelineTimeoutError"
        assert f"stage {1 - stopped} (rank {1 - stopped}) waited 3 s for the {what} of micro-batch 2" in end.message
        assert f"from stage {stopped} (rank {stopped})" in end.message
        assert end.exit_code == 1
        assert 3 <= end.seconds < SOON_S


def test_failure_during_exchange_and_during_sends() -> None:
    ended = run(raise_in_exchange, stages=3)
    for end in ended[:2]:
        assert "stage 2 (rank 2) failed: ValueError" in end.message
        assert "waiting for the norms of the gradients from stage" in end.message
    assert all(end.exit_code == 1 and end.seconds < SOON_S for end in ended)

    ended = run(raise_while_peer_sends, stages=2)
    assert "stage 1 (rank 1) failed: AssertionError: a fault of its own" in ended[0].message
    assert "by stage 1 (rank 1)" in ended[0].message
    assert all(end.exit_code == 1 and end.seconds < SOON_S for end in ended)


def notices(store: dist.Store, *, world: int) -> list[FailureNotice]:
    return [FailureNotice(store, rank=rank, world_size=world) for rank in range(world)]


@pytest.fixture(scope="module")
def store() -> dist.Store:
    return dist.HashStore()


def abort_for_ever(transport: Transport) -> None:
    """A backend of a device does not come back from the abort of what waits there."""
    transport.notice.is_strict = True
    transport.notice.interrupt = lambda: time.sleep(PATIENCE_S)
    if transport.stage == 0:
        time.sleep(PATIENCE_S)  # a device is waited for
    raise AssertionError("a fault of its own")


def test_an_abort_that_does_not_end_keeps_no_process() -> None:
    ended = run(abort_for_ever, stages=2)
    assert [end.exit_code for end in ended] == [1, 1]
    assert all(end.seconds < SOON_S for end in ended)
    assert ended[1].message == "a fault of its own"


def test_first_failure_counts(store: dist.Store) -> None:
    first, second, third = notices(store, world=3)
    second.publish(ValueError("the cause"))
    assert first._arrived.wait(5)
    first.publish(RuntimeError("a consequence"))
    error = third.explain(RuntimeError("closed"), waiting_for="x from stage 1 (rank 1)", peer=1, timed_out_after=None)
    assert isinstance(error, PeerFailedError)
    assert error.failure.rank == 1
    assert error.failure.summary == "ValueError: the cause"
    first.fail(error)  # all have read it, so this does not linger
    for notice in (second, third):
        notice.close()

    again = notices(store, world=3)  # a new run over the same store starts clean
    late = again[0].explain(RuntimeError(), waiting_for="x from stage 1 (rank 1)", peer=1, timed_out_after=5.0)
    assert isinstance(late, PipelineTimeoutError)
    for notice in again:
        notice.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("pipeline-failure")]


def test_waiting_for_mail_prints_nothing(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """Torch's store warns whenever a wait times out, which in a run of hours would be every minute."""
    monkeypatch.setattr(failure, "PERIOD_S", 0.05)
    watching = notices(dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False), world=2)
    for notice in watching:
        notice.is_watching = True
    time.sleep(0.5)
    assert [notice._inbox._read > 5 for notice in watching] == [True, True]  # calls and ticks
    for notice in watching:
        notice.close()
        assert notice.failure is None
    assert capfd.readouterr() == ("", "")


def test_consequences_are_shown_as_one_line(
    store: dist.Store, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    for error, shown in {
        ValueError("of rank 1"): "ValueError: of rank 1",
        ValueError("the cause"): "[rank1]: ValueError: the cause, as on rank 0",
        RuntimeError("[pair.cc:553] Connection closed by peer [::1]:5"): "; then rank 1 lost its connections",
        RuntimeError("of its own. And more."): "; then rank 1 met RuntimeError: of its own",
        PeerFailedError("rank 0 failed: x\nrank 1 was waiting", Failure(0, "x")): "; rank 1 was waiting",
    }.items():
        first, second = notices(store, world=2)
        first.publish(ValueError("the cause"))
        second.fail(error)
        sys.excepthook(type(error), error, None)
        (told,) = capfd.readouterr().err.splitlines()
        assert told.endswith(shown)
        assert told == shown or told.startswith("[rank1]: rank 0 failed: ")
        first.close()
