"""Ranks that run another model, configuration or version than the others are told so at setup."""

from __future__ import annotations

import json
from collections.abc import Mapping

from torch.distributed import Store


def check_agreement(store: Store, rank: int, world_size: int, facts: Mapping[str, str]) -> None:
    """Raise on every rank if `facts` are not the same on all. All ranks must call it, as often as each other.

    Args:
        facts: what has to be equal, by what to call it: ``{"torch": "2.13.0", "num_microbatches": "8"}``.

    Raises:
        ValueError: names what differs, on which ranks, and the values.
        RuntimeError: a rank did not come here within the store's timeout.
    """
    turn = store.add(f"agreement/{rank}", 1)
    store.set(f"agreement/{turn}/{rank}", json.dumps(dict(facts)))
    everyone = [json.loads(store.get(f"agreement/{turn}/{other}")) for other in range(world_size)]
    differing = [name for name in facts if any(other.get(name) != facts[name] for other in everyone)]
    if differing:
        told = "; ".join(f"{name}: {_by_value([other.get(name) for other in everyone])}" for name in differing)
        raise ValueError(
            f"the ranks do not agree on {', '.join(differing)} ({told}); start all of them with the same script, "
            f"arguments, data and packages"
        )


def _by_value(values: list[str]) -> str:
    ranks: dict[str, list[str]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(str(rank))
    return ", ".join(f"{value} on rank{'s' * (len(own) > 1)} {' '.join(own)}" for value, own in ranks.items())
