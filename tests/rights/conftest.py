"""One broker with an authorizer for the tests of this folder that need no cluster of their own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.rights.test_each_right import USERS
from tests.rights.test_lane_makers import ETL, MAKER
from tests.secured import SecuredBroker, secured_broker


@pytest.fixture(scope="session")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredBroker]:
    """It grants nobody anything."""
    with secured_broker(tmp_path_factory.mktemp("rights"), *USERS, MAKER, ETL) as broker:
        yield broker
