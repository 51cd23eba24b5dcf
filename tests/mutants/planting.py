"""How a bug is planted: one function of the product is replaced while a context lasts."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

Planted = AbstractContextManager[object]
Wrong = Callable[..., Any]


def instead_of(owner: object, name: str) -> Callable[[Wrong], Callable[[], Planted]]:
    """The wrong function takes the place of the owner's; its docstring says what is broken."""

    def register(wrong: Wrong) -> Callable[[], Planted]:
        def plant() -> Planted:
            return patch.object(owner, name, wrong)

        plant.__doc__ = wrong.__doc__
        return plant

    return register


def wrapping(owner: object, name: str) -> Callable[[Wrong], Callable[[], Planted]]:
    """As `instead_of`; the wrong function is also given the right one, as its first argument."""

    def register(wrong: Wrong) -> Callable[[], Planted]:
        def plant() -> Planted:
            right = getattr(owner, name)
            return patch.object(owner, name, lambda *given, **named: wrong(right, *given, **named))

        plant.__doc__ = wrong.__doc__
        return plant

    return register
