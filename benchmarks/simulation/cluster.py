"""Router, coordinator and engines of one app on a virtual clock: the cores themselves, over simulated links.

It knows messages only: whatever the router comes to send, it is carried. Use inside `benchmarks.simulation.clock.run`.
"""

import asyncio
from functools import partial

from benchmarks.joined import JoinedCores
from benchmarks.simulation.links import Link
from benchmarks.simulation.profile import Profile
from benchmarks.simulation.replica import SimulatedReplica
from kvstate.protocol import Message
from router.driver import RoundDriver

PLAN_S = 1e-3
"""What a plan is taken to cost the router, which has a share of its time for them (router/plan_cache.py). Nothing else
that it does takes time here.
"""


class SimulatedCluster(JoinedCores):
    """Serves from its making on."""

    ticks_per_report = 20

    def __init__(self, profile: Profile, driver: type[RoundDriver] = RoundDriver, plan_s: float = PLAN_S) -> None:
        now = asyncio.get_running_loop().time
        names = [model.name for model in profile.models]
        super().__init__(names, profile.settings, now, lambda: plan_s * self.router.planning.plans_made, driver)
        self._replicas: dict[str, SimulatedReplica] = {}
        self._to_replica: dict[str, Link] = {}
        self._from: dict[str, Link] = {}
        self._connect()
        for rank, model in enumerate(profile.models):
            for number in range(model.replicas):
                name = model.name if model.replicas == 1 else f"{model.name}#{number}"
                replica = SimulatedReplica(model.name, rank, model.spec, partial(self._reply, name), self.others)
                self._to_replica[name], self._from[name] = Link(model.link), Link(model.link)
                self._replicas[name], self.engines[name] = replica, replica.engine
                self._register(name, model.name, replica.backend, replica.profile)
        self._route(self.coordinator.tick(now()))
        self._ticking = asyncio.create_task(self._tick())

    async def close(self) -> None:
        self._ticking.cancel()
        await self.router.close()

    def _submit(self, sender: str, replica_id: str, message: Message) -> bool:
        with self.others:
            self._to_replica[replica_id].send(message, partial(self._replicas[replica_id].submit, sender))
        return True

    def _reply(self, name: str, receiver: str, message: Message) -> None:
        self._from[name].send(message, partial(self._receive, name, receiver))
