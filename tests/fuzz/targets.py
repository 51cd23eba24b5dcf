"""All fuzzed decoders, by name."""

from __future__ import annotations

from tests.fuzz import batches, controllers, kernels, records, texts, wire
from tests.fuzz.target import Target

TARGETS: dict[str, Target] = {
    target.name: target
    for group in (records, batches, kernels, controllers, wire, texts)
    for target in group.TARGETS
}
