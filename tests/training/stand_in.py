"""Takes a script's place where a launcher starts it: lends its environment to a process that imported Lightning before.

A dozen processes that import Lightning take a minute on two cores, and what is tested is what launchers pass on.
Arguments: the address of `tests.training.test_nodes.Host`, and those of the script.
"""

import os
import sys
from multiprocessing.connection import Client

if __name__ == "__main__":
    with Client(sys.argv[1]) as connection:
        connection.send((dict(os.environ), sys.argv))
        sys.exit(connection.recv())
