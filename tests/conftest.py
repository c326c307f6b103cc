"""Fixtures shared by every test folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import hypothesis
import pytest

from ranks import Ranks

# Seeded, and no test asserts a time.
hypothesis.settings.register_profile(
    "seeded",
    derandomize=True,
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("seeded")


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], Ranks]]:
    """`ranks(world_size)`: the session's pool of that many rank processes; see `ranks.py`."""
    pools: dict[int, Ranks] = {}

    def pool(world_size: int) -> Ranks:
        if world_size not in pools:
            pools[world_size] = Ranks(world_size)
        return pools[world_size]

    yield pool
    for started in pools.values():
        started.close()
