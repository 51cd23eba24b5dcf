"""A pytest plugin that plants a bug for a whole run: ``pytest -p tests.mutants.plugin --mutant NAME``."""

from __future__ import annotations

from contextlib import ExitStack

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """The option."""
    parser.addoption("--mutant", default="", help="plant this bug")


def pytest_sessionstart(session: pytest.Session) -> None:
    """Plant it until the end."""
    from tests.mutants.catalogue import (
        planted,
    )  # no sooner: hypothesis minds what is imported with plugins

    bug = ExitStack()
    bug.enter_context(planted(session.config.getoption("--mutant")))
    session.config.add_cleanup(bug.close)
