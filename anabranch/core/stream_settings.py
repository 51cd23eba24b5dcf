"""Settings that a user may choose for a stream, judged before anything is logged of them."""

from __future__ import annotations

from collections.abc import Mapping

from anabranch.core import limits
from anabranch.core.decisions import autoscale
from anabranch.errors import InvalidArgument, UnsupportedSetting

REPLICATION = "replication.factor"
MIN_ISR = "min.insync.replicas"
MAX_MESSAGE = "max.message.bytes"
_LONG = (1 << 63) - 1
_INT = (1 << 31) - 1
_REPLICAS = (1 << 15) - 1
# The settings of a stream's topic, with the least and the most that can be meant.
TOPIC = {
    "retention.ms": (-1, _LONG),
    "retention.bytes": (-1, _LONG),
    "segment.bytes": (1, _INT),
    "segment.ms": (1, _LONG),
    MAX_MESSAGE: (1, limits.MESSAGE.value),
    MIN_ISR: (1, _REPLICAS),
    REPLICATION: (-1, _REPLICAS),
}
KNOWN = TOPIC.keys() | autoscale.SETTINGS


def check_settings(settings: Mapping[str, str]) -> None:
    """`UnsupportedSetting`, `InvalidArgument`: a setting, by name, that a stream does not take."""
    for name, value in settings.items():
        limits.SETTING.check(len(name), "a setting's name")
        limits.SETTING.check(len(value), f"the value of {name}")
    unknown = sorted(settings.keys() - KNOWN)
    if unknown:
        raise UnsupportedSetting(
            f"a stream has no setting {', '.join(unknown)}; it takes {', '.join(sorted(KNOWN))}"
        )
    for name in settings.keys() & TOPIC.keys():
        if autoscale.whole_number(name, settings[name], *TOPIC[name]) == 0 and name == REPLICATION:
            raise InvalidArgument(f"{name}=0: a number from 1, or -1 for the broker's default")
    size = int(settings.get(MAX_MESSAGE, limits.MESSAGE.value))
    if size < limits.LEAST_MESSAGE.value:
        raise InvalidArgument(
            f"{MAX_MESSAGE}={size}: set {limits.LEAST_MESSAGE.value} or more; brokers hold the markers of native "
            "transactions against it, too"
        )
    autoscale.parse_policy(settings)
