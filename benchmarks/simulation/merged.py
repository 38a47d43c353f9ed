"""Rounds as SpecInfer has them (arXiv 2305.09781), to compare with.

Each drafter drafts by itself, all drafts merge into one token tree, the target checks the tree.
"""

import asyncio
from collections.abc import Sequence

from kvstate.protocol import Drafted
from router.driver import RoundDriver
from router.plan import Plan, members_of
from router.trees import TokenTree


class MergedRounds(RoundDriver):
    """For plans of a group and the target; drafters that are lost are not for here."""

    async def _nested(self, plan: Plan) -> list[int]:
        group, target = plan.chain
        count = min(plan.windows[0], self._room([]))
        names = members_of(group) if count > 0 else ()
        drafts = await asyncio.gather(*(self._draft(name, count) for name in names))
        tree = merged(drafts)
        verified, _ = await self._verified(target, [[], list(tree.tokens)], 1, tree)
        return verified

    async def _draft(self, name: str, count: int) -> Sequence[int]:
        reply = await self._steps.run(name, "draft", lambda holder: self._steps.draft(holder, (), count))
        assert isinstance(reply, Drafted), reply
        return reply.tokens


def merged(drafts: Sequence[Sequence[int]]) -> TokenTree:
    """Beginnings that are the same are there once; `parents` as in `Check`, −1 for a node that follows the text."""
    nodes: dict[tuple[int, int], int] = {}
    for draft in drafts:
        parent = -1
        for token in draft:
            parent = nodes.setdefault((parent, token), len(nodes))
    return TokenTree(tuple(token for _, token in nodes), tuple(parent for parent, _ in nodes))
