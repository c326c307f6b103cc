"""What a user may set, in vLLM's `additional_config` under the key `anabranch`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from anabranch.schedules import Schedule

KEY = "anabranch"


@dataclass(frozen=True)
class Settings:
    """`--additional-config '{"anabranch": {"schedule": "serial"}}'`.

    - `schedule`: of the decode steps; see `anabranch.schedules`. vLLM binds a rank's threads to
      cores, and the side stream shares the first of them with the main stream: it gains only
      while that waits for the exchange, so `auto` is what runs unless another is named.
    """

    schedule: Schedule = Schedule.AUTO


def read_settings(additional_config: object) -> Settings:
    """Settings from vLLM's `additional_config`. Raises ValueError for what is not known."""
    given: Any = additional_config.get(KEY, {}) if isinstance(additional_config, Mapping) else {}
    if not isinstance(given, Mapping):
        raise ValueError(f'additional_config["{KEY}"] must be a mapping, got {given!r}')
    unknown = sorted(set(given) - {"schedule"})
    if unknown:
        raise ValueError(
            f'additional_config["{KEY}"] has unknown settings: {", ".join(map(str, unknown))}'
        )
    if "schedule" not in given:
        return Settings()
    return Settings(read_schedule(f'additional_config["{KEY}"]["schedule"]', given["schedule"]))


def read_schedule(name: str, given: object) -> Schedule:
    """The schedule of that name. Raises ValueError, naming the setting, for any other text."""
    schedules = {schedule.value: schedule for schedule in Schedule}
    if not isinstance(given, str) or given not in schedules:
        raise ValueError(f"{name} must be one of {', '.join(schedules)}, got {given!r}")
    return schedules[given]
