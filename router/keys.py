"""What the table keeps its estimates by."""

Pair = tuple[str, str]
"""Two models, the cheaper one first."""

Triple = tuple[str, str, str]
"""Three models, cheapest first."""

Context = tuple[str, str]
"""A request's class and sampling regime (router/classes.py)."""

EVERY: Context = ("all", "all")
