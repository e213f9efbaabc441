"""How long the fuzz goes on: a moment and always the same, or with HYPOTHESIS_PROFILE=long much longer and at random.

    HYPOTHESIS_PROFILE=long python -m pytest tests/fuzz

An example that fails is shrunk and shown; `@example` keeps it.
"""

from __future__ import annotations

import os
from datetime import timedelta

from hypothesis import HealthCheck, settings

COMMON = settings(
    deadline=timedelta(seconds=20),  # of an example: against hangs, on a machine that may be slow and busy
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture, HealthCheck.data_too_large],
)
settings.register_profile("short", COMMON, derandomize=True, max_examples=40, database=None)
settings.register_profile("long", COMMON, max_examples=5000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "short"))
