"""Splitting and copying of batches with and without compiled code."""

from __future__ import annotations

import pytest

from anabranch.batches import builder, framing, split


@pytest.fixture(params=["compiled", "plain"])
def made_with(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "compiled":
        framing.warm()
    else:
        for module in (split, builder):
            monkeypatch.setattr(module, "kernels_for", lambda _: None)
