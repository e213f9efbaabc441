"""torchrun, for `tests.scripts.Host`: what it starts are stand-ins for the script of another host."""

import os

from torch.distributed.run import main

if __name__ == "__main__":
    os.environ["SCRIPTS_HOST"] = os.environ.pop("WORKERS_HOST")
    main()
