import pytest

from specrelay.batch_run import running_app
from specrelay.endpoint import Endpoint
from specrelay.exits import Refused
from tests.specrelay.fake_app import Answer, FakeApp


@pytest.mark.parametrize("status", [200, 503])
def test_an_app_of_the_same_config_is_used_also_while_its_target_is_away(app: FakeApp, status: int) -> None:
    app.routes["/health"] = lambda body: Answer({"config_hash": "abc"}, status=status)
    assert running_app(app.endpoint, "abc") == app.endpoint


def test_another_config_is_refused_and_both_hashes_are_named(app: FakeApp) -> None:
    app.routes["/health"] = lambda body: Answer({"config_hash": "abc"})
    with pytest.raises(Refused, match=r"hash abc, wanted def"):
        running_app(app.endpoint, "def")


def test_nobody_there_means_start_one() -> None:
    assert running_app(Endpoint("http://127.0.0.1:9"), "abc") is None


def test_a_serve_without_apps_means_start_one(app: FakeApp) -> None:
    app.routes["/health"] = lambda body: Answer("Path '/health' not found.", status=404)
    app.routes["/-/routes"] = lambda body: Answer({})
    assert running_app(app.endpoint, "abc") is None


def test_another_server_is_refused(app: FakeApp) -> None:
    app.routes["/health"] = lambda body: Answer("fine")
    with pytest.raises(Refused, match="not SpecRelay"):
        running_app(app.endpoint, "abc")
