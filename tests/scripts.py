"""Runs scripts in processes that were forked with Lightning imported, for launchers that start `tests/stand_in.py`."""

from __future__ import annotations

import atexit
import gc
import multiprocessing
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, Listener, wait
from multiprocessing.reduction import recv_handle
from pathlib import Path
from types import ModuleType
from typing import IO, Any

from tests.launching import PRELOADED

STAND_IN = str(Path(__file__).with_name("stand_in.py"))
TORCHRUN = ("-m", "torch.distributed.run")


class Host:
    """Runs a script for each process that stands in for it, until closed; none for longer than `timeout` seconds."""

    def __init__(self, script: Path, timeout: float) -> None:
        self._script, self._timeout = script, timeout
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(PRELOADED)
        self._listener = Listener(family="AF_UNIX")
        self._processes: list[Any] = []
        self._torchrun: Host | None = None
        threading.Thread(target=self._accept, daemon=True).start()

    def start(
        self,
        launcher: Sequence[str],
        arguments: Sequence[str],
        cwd: Path | None = None,
        output: int | IO[Any] = subprocess.PIPE,
        **variables: str,
    ) -> subprocess.Popen[str]:
        """`python` with a launcher's options, the script, and the script's arguments, in a session of its own.

        torchrun has imported torch already, as the script has.
        """
        address = str(self._listener.address)
        if tuple(launcher[:2]) == TORCHRUN:
            if self._torchrun is None:
                self._torchrun = Host(Path(__file__).with_name("torchrun.py"), self._timeout)
            options = [*launcher[2:], STAND_IN, *arguments]
            return self._torchrun.start([], options, cwd, output, WORKERS_HOST=address, **variables)
        return subprocess.Popen(
            [sys.executable, *launcher, STAND_IN, *arguments],
            cwd=cwd,
            env={**os.environ, "OMP_NUM_THREADS": "1", "SCRIPTS_HOST": address, **variables},
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def close(self) -> None:
        self._listener.close()
        for process in self._processes:
            process.kill()
        if self._torchrun is not None:
            self._torchrun.close()

    def _accept(self) -> None:
        while True:
            try:
                connection = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: Connection) -> None:
        # A stand-in that is killed takes no answers.
        with connection, suppress(OSError, EOFError):
            environment, argv, folder = connection.recv()
            outputs = [Connection(recv_handle(connection), readable=False) for _ in (1, 2)]
            arguments = (str(self._script), environment, argv, folder, outputs)
            process = self._context.Process(target=_run, args=arguments)
            self._processes.append(process)
            process.start()
            for output in outputs:
                output.close()
            connection.send(process.pid)
            # Its end, the stand-in's, or too long.
            if process.sentinel not in wait([process.sentinel, connection], self._timeout):
                process.kill()
            process.join()
            connection.send(process.exitcode)


def _run(script: str, environment: dict[str, str], argv: list[str], folder: str, outputs: list[Connection]) -> None:
    """The script as an interpreter runs it from start to end, under the name and with what its stand-in has."""
    gc.freeze()  # as in tests.launching
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    multiprocessing.set_start_method(None, force=True)
    sys.argv = argv  # the stand-in's, so that a launcher in the script starts another one
    main = sys.modules["__main__"] = ModuleType("__main__")
    main.__file__ = script
    sys.path.insert(0, os.path.dirname(script))
    for number, output in enumerate(outputs, 1):
        os.dup2(output.fileno(), number)
        output.close()
    try:
        exec(compile(Path(script).read_text(), script, "exec"), vars(main))
    except Exception:
        sys.excepthook(*sys.exc_info())
        raise SystemExit(1) from None
    finally:
        atexit._run_exitfuncs()
