"""What the router knows and chooses, as plain rows for GET /router/table. Pure rendering."""

from collections.abc import Iterable, Mapping, Sequence

from kvstate.protocol import Member
from router.keys import EVERY, Context, Pair
from router.plan import Plan, stated
from router.planning import Planning
from router.snapshot import ModelCost, PairEstimate
from router.table import RouterTable


def explain(planning: Planning, members: Sequence[Member], can_serve: bool) -> dict[str, object]:
    """The plan in use for requests without a wish of their own, models with their replicas, pairs and candidates."""
    rows = as_rows(planning.table)
    for row in rows["models"]:
        row["replicas"] = [_replica_row(member, planning) for member in members if member.info.model == row["name"]]
    plan, candidates = planning.overview()
    return {
        "chain": [stated(element) for element in plan.label] if can_serve else [],
        "windows": plan.windows if can_serve else [],
        **rows,
        "candidates": [_candidate_row(planning, candidate) for candidate in candidates],
        "explore_share": planning.explore_share,
    }


def _candidate_row(planning: Planning, plan: Plan) -> dict[str, object]:
    record = planning.records.get(plan.kind)
    return {
        "chain": [stated(element) for element in plan.label],
        "windows": plan.windows,
        "tail_window": plan.tail.window if plan.tail is not None else None,
        "predicted_ms_per_token": plan.predicted_ms_per_token,
        "measured_ms_per_token": record.ms_per_token if record else None,
        "rounds": record.rounds if record else 0,
    }


def _replica_row(member: Member, planning: Planning) -> dict[str, object]:
    info = member.info
    total = info.num_blocks * info.block_tokens
    return {
        "id": info.replica_id,
        "node": info.node,
        "sequences": member.sequences,
        "kv_used_tokens": total - member.free_blocks * info.block_tokens,
        "kv_total_tokens": total,
        "up": member.up,
        "slowness": planning.replicas.slowness(info.replica_id),
    }


def as_rows(table: RouterTable) -> dict[str, list[dict[str, object]]]:
    """`models` and `pairs` of GET /router/table; replicas are added by who knows the membership."""
    snapshots = {context: table.snapshot(context) for context in table.contexts}
    models = [_model_row(model) for model in snapshots[EVERY].models.values()]
    pairs = [row for context, seen in snapshots.items() for row in _pair_rows(context, seen.pairs)]
    return {"models": models, "pairs": [row for row in pairs if row["class"] == EVERY[0] or row["samples"]]}


def _model_row(model: ModelCost) -> dict[str, object]:
    return {
        "name": model.name,
        "level": model.level,
        "base_ms": model.base_ms,
        "per_token_ms": model.per_token_ms,
        "per_sequence_ms": model.per_sequence_ms,
        "queue": model.queue_ms,
    }


def _pair_rows(context: Context, pairs: Mapping[Pair, PairEstimate]) -> Iterable[dict[str, object]]:
    for _, pair in sorted(pairs.items()):
        yield {
            "lower": pair.lower,
            "upper": pair.upper,
            "class": context[0],
            "regime": context[1],
            "divergence": pair.divergence,
            "acceptance": pair.acceptance,
            "samples": pair.samples,
            "divergence_bounds": None if pair.bounds is None else list(pair.bounds.divergence),
            "predicted_acceptance": None if pair.bounds is None else list(pair.bounds.acceptance),
        }
