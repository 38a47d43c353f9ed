from collections.abc import Iterator

import pytest

from tests.specrelay.fake_app import FakeApp, serving


@pytest.fixture
def app() -> Iterator[FakeApp]:
    with serving() as fake:
        yield fake
