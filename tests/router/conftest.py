"""A router between backends, for every test of it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.router.backends import Site, open_site


@pytest.fixture
def site() -> Iterator[Site]:
    with open_site() as made:
        yield made
