"""A rank 0 that is not the only one at its place, or finds something else there, says so."""

from __future__ import annotations

import os
import socket
from datetime import timedelta

import pytest

from lightning_pipeline.runtime import rendezvous
from tests.launching import PATIENCE_S, SOON_S, free_port, run_ranks


def meet_as_rank_0(port: int) -> None:
    os.environ["MASTER_PORT"] = str(port)
    rendezvous.LINGER_S = 0.5
    rendezvous.meet(0, 2, timedelta(seconds=PATIENCE_S), way_out="count again")


@pytest.mark.multiprocess
def test_two_processes_that_are_rank_0_both_hear_of_it() -> None:
    for ended in run_ranks(meet_as_rank_0, free_port(), world=2):
        assert "are both rank 0; count again" in ended.error
        assert ended.seconds < SOON_S


def test_a_port_that_another_program_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "ANSWER_S", 0.3)
    with socket.create_server(("127.0.0.1", free_port())) as silent:
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(silent.getsockname()[1]))
        words = (
            r"rank 0 of 2 cannot listen at 127.0.0.1:\d+, where another program does; set another MASTER_PORT, or wait"
        )
        with pytest.raises(ValueError, match=words):
            rendezvous.meet(0, 2, timedelta(seconds=PATIENCE_S), way_out="wait")
