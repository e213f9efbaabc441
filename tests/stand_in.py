"""Takes a script's place where a launcher starts it, and lends its own place to a process that has Lightning already.

A dozen processes that import Lightning take a minute on two cores, and what is tested is what launchers and scripts
make of one another. This process passes on its environment, arguments, folder and outputs, the signals that it gets,
and how the other one ended: see `tests.scripts`.
"""

import os
import signal
import sys
from multiprocessing.connection import Client
from multiprocessing.reduction import send_handle

if __name__ == "__main__":
    with Client(os.environ["SCRIPTS_HOST"]) as connection:
        connection.send((dict(os.environ), sys.argv, os.getcwd()))
        for output in (1, 2):
            send_handle(connection, output, None)
        process = connection.recv()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda received, _: os.kill(process, received))
        exit_code = connection.recv()
    if exit_code == -signal.SIGKILL:
        os.kill(os.getpid(), signal.SIGKILL)
    sys.exit(exit_code)
