"""New requests go where their steps will take least."""

from router.replicas import MOST_PREFERRED, MOST_PREFIXES, Replicas
from router.snapshot import ModelCost

TARGET = ModelCost("t", 1, 20.0, per_token_ms=1.0)
LONG = list(range(640))


def order(replicas: Replicas, prompt: list[int], cost: ModelCost = TARGET) -> tuple[str, ...]:
    replicas.serving = {"t": ["x", "y", "z"]}
    return replicas.preferred(["t"], {"t": cost}, prompt)["t"]


def test_the_least_loaded_one_comes_first() -> None:
    replicas = Replicas()
    for name, count in (("x", 3), ("y", 1), ("z", 2)):
        for _ in range(count):
            replicas.opened({"t": name}, [])
    assert order(replicas, []) == ("y", "z", "x")
    for _ in range(3):
        replicas.closed({"t": "x"})
    assert order(replicas, []) == ("x", "y", "z")


def test_many_that_come_at_once_are_spread() -> None:
    replicas = Replicas()
    for _ in range(30):
        replicas.opened({"t": order(replicas, [])[0]}, [])
    assert set(replicas.open.values()) == {10}


def test_a_straggler_gets_what_it_can_do() -> None:
    replicas = Replicas()
    for _ in range(50):
        replicas.observe("x", 60.0, 20.0)
        for name in ("y", "z"):
            replicas.observe(name, 20.0, 20.0)
    for _ in range(12):
        replicas.opened({"t": order(replicas, [])[0]}, [])
    assert replicas.open["x"] <= 1
    replicas.lost("t", "x")
    assert replicas.slowness("x") == 1.0


def test_a_prompt_goes_where_its_beginning_is_cached_unless_that_costs_more() -> None:
    replicas = Replicas()
    replicas.opened({"t": "z"}, LONG)
    assert order(replicas, [*LONG, 1, 2])[0] == "z"
    assert order(replicas, [7, *LONG])[0] != "z"
    for _ in range(20):
        replicas.opened({"t": "z"}, [])
    assert order(replicas, [*LONG, 1, 2])[0] != "z"
    replicas.lost("t", "z")
    assert order(replicas, LONG) == order(replicas, [])


def test_what_is_remembered_of_prompts_is_bounded() -> None:
    replicas = Replicas()
    for i in range(MOST_PREFIXES):
        replicas.opened({"t": "x"}, [i] * 200)
    assert len(replicas._prefixes) <= MOST_PREFIXES


def test_models_with_one_replica_need_no_order() -> None:
    replicas = Replicas({"t": ["x"], "d": []})
    assert replicas.preferred(["t", "d"], {"t": TARGET}, LONG) == {}


def test_among_thousands_some_are_compared_and_the_one_with_the_prompt_always() -> None:
    replicas = Replicas({"t": [f"t-{i}" for i in range(10_000)]})
    for _ in range(20_000):
        replicas.opened({"t": replicas.preferred(["t"], {"t": TARGET}, [])["t"][0]}, [])
    assert max(replicas.open.values()) <= 4
    replicas.opened({"t": "t-7777"}, LONG)
    named = replicas.preferred(["t"], {"t": TARGET}, LONG)["t"]
    assert named[0] == "t-7777"
    assert len(named) == MOST_PREFERRED
