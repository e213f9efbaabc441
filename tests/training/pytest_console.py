"""What the command `pytest` is, for `tests.scripts.Host`."""

import sys

import pytest

if __name__ == "__main__":
    sys.exit(pytest.main())
