"""Planning takes no more than its share, and plans are as fresh as that allows."""

from router.plan import Plan
from router.plan_cache import FRESH_S, IDLE_SHARE, MOST_PLANS, MOST_SAVED_S, SHARE, STALE_S, PlanCache


class Time:
    def __init__(self) -> None:
        self.now_s = self.work_s = 0.0


class Maker:
    """Each plan takes `cost_s` of work."""

    def __init__(self, cost_s: float) -> None:
        self.time, self.cost_s, self.made = Time(), cost_s, 0
        self.cache = PlanCache(lambda: self.time.now_s, lambda: self.time.work_s)
        self.presents: list[Plan | None] = []

    def __call__(self, present: Plan | None) -> Plan:
        self.made += 1
        self.presents.append(present)
        self.time.work_s += self.cost_s
        return Plan((str(self.made),), (), 0.0)

    def get(self, key: object, after_s: float = 0.0) -> str:
        self.time.now_s += after_s
        return self.cache.get(key, self).chain[0]


def test_a_fresh_plan_serves_and_an_old_one_is_made_anew_from_it() -> None:
    maker = Maker(0.0)
    assert [maker.get("a"), maker.get("a", FRESH_S), maker.get("a", 2 * FRESH_S), maker.get("b")] == [
        "1",
        "1",
        "2",
        "3",
    ]
    assert maker.presents == [None, Plan(("1",), (), 0.0), None]


def test_planning_takes_its_share_of_the_time() -> None:
    maker = Maker(0.005)
    for _ in range(4000):
        maker.get("a", 0.01)  # 40 s, asking for a plan each 10 ms
    assert maker.time.work_s <= IDLE_SHARE * maker.time.now_s + MOST_SAVED_S + maker.cost_s
    assert maker.made > 100


def test_a_busy_router_plans_less() -> None:
    maker = Maker(0.005)
    for number in range(4000):
        maker.time.now_s += 0.01
        maker.time.work_s += 0.0099
        maker.get(number if maker.cache.has_time() else "known")
    num_stale = maker.time.now_s / STALE_S  # made in any case
    assert 100 < maker.made <= (SHARE * maker.time.now_s + MOST_SAVED_S) / maker.cost_s + num_stale + 2


def test_no_plan_grows_stale_though_there_is_no_time() -> None:
    maker = Maker(10.0)
    assert [maker.get("a"), maker.get("a", STALE_S), maker.get("a", 0.1)] == ["1", "1", "2"]


def test_plans_are_bounded() -> None:
    maker = Maker(0.0)
    for i in range(2 * MOST_PLANS):
        maker.get(i)
    assert len(maker.cache) == MOST_PLANS
    assert maker.get(2 * MOST_PLANS - 1) == str(2 * MOST_PLANS)
