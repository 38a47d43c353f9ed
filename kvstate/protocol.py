"""The messages that router, coordinator, replicas and ingress exchange.

Every message is a frozen struct. On the wire it is a msgpack array whose first element names its type;
`cluster/transport.py` packs many of them into one frame. This module knows neither sockets nor tensors.

Letters used below: a *sequence* holds token ids at positions 0, 1, 2, …; `from_len` says that `tokens[0]` stands at
position `from_len`; `committed_len` says that positions below it never change. Who sends what:

    ingress     → router       OpenRequest, CutRequest, CancelRequest
    router      → ingress      Delivered, Failed
    router      → coordinator  Admit, Resume, Committed, Finish
    coordinator → router       Admitted, Members
    router      → replica      Open, Draft, Check, Probe
    replica     → router       Opened, Drafted, Verdict, Probed, Need
    coordinator → replica      Commit, Close
    replica     → coordinator  Register, Report, Acked, Closed
"""

import enum
from typing import NamedTuple

import msgspec


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True, forbid_unknown_fields=True, gc=False):
    """Base of all messages: immutable, tagged with the class name.

    Immutable ones never refer to themselves, so the garbage collector need not follow them (`gc`).
    """


class Value(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """Base of the untagged values that messages carry."""


class Key(NamedTuple):
    """Order of one sequence's messages: the round driver numbers epochs (rounds), `step` rises with every message."""

    epoch: int
    step: int


class Sampling(Value, frozen=True):
    """How every level samples. `temperature` below 1e-5 is greedy; all other defaults change nothing.

    logit_bias          (token id, what is added to its logit)
    repetition_penalty  divides positive logits of tokens of prompt and output, multiplies negative ones
    presence_penalty    taken from the logits of tokens that the output has, frequency_penalty once per occurrence
    banned_ids          never sampled; `end_ids` not before the output has `min_tokens` tokens
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    min_p: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    banned_ids: tuple[int, ...] = ()
    end_ids: tuple[int, ...] = ()
    min_tokens: int = 0

    def forbids(self, token: int, output_index: int) -> bool:
        """Whether `token` may not be the output token of this index."""
        return token in self.banned_ids or (output_index < self.min_tokens and token in self.end_ids)


class Logprobs(Value, frozen=True):
    """Log-softmax of the target's raw logits where a token was sampled: that token's, and the likeliest tokens'."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


Top = tuple[tuple[int, float], ...]
"""The likeliest tokens at one position with their probabilities, falling, as the sampler sees them: after bias,
penalties, masks, temperature, min_p, top_k and top_p. None of probability 0, so fewer than asked for where fewer can be
sampled; a token that is not listed is at most as likely as the last one. Where sampling is greedy: at temperature 1,
after bias, penalties and masks. Empty where unknown.
"""


Guesses = tuple[tuple[int, float], ...]
"""The tokens that a drafter holds likeliest to be the target's at one position, its own sample first, then falling:
each with the probability that it is, as the drafter itself has it.
"""


class Speculation(Value, frozen=True):
    """A request's wish: `auto` lets the planner choose, `off` is the target alone, `fixed` names chain and windows.

    `windows` may be empty with `fixed`: they are planned then.
    """

    mode: str = "auto"
    chain: tuple[str, ...] = ()
    windows: tuple[int, ...] = ()


class Timing(Value, frozen=True):
    """What the batches that served one message cost, summed: linear in the three counts, so sums stay fit for a fit.

    `queue_s`: all the time at the replica that was not in one of its batches.
    """

    batches: int = 0
    rows: int = 0
    sequences: int = 0
    busy_s: float = 0.0
    queue_s: float = 0.0


class Profile(Value, frozen=True):
    """Latency of a batch as the replica measured it at load: base + per_token × rows + per_sequence × sequences."""

    base_ms: float
    per_token_ms: float = 0.0
    per_sequence_ms: float = 0.0


# ----------------------------------------------------------------------------------------------- ingress and router


class FinishReason(enum.StrEnum):
    STOP = "stop"
    LENGTH = "length"


class SpecMetrics(Value, frozen=True):
    """Counts at the target for one request; `histogram[k]` is the number of checks that accepted k tokens."""

    rounds: int
    draft_tokens: int
    accepted_draft_tokens: int
    histogram: tuple[int, ...]
    most_draft_tokens: int
    chain: tuple[str, ...]


class OpenRequest(Message, frozen=True):
    """Start a request, or go on with one whose stream broke: then `delivered` holds the output tokens the client has.

    `max_tokens` counts output from its first token, delivered ones included. `logprobs`: how many likeliest tokens are
    stated beside each output token's log-probability; −1 states none at all. `request_class`: router/classes.py.
    `gather_s`: how long tokens may wait for others, so that one message tells of several rounds; the last never wait.
    """

    request_id: str
    prompt: tuple[int, ...]
    sampling: Sampling
    max_tokens: int
    stop_ids: tuple[int, ...]
    deadline_s: float
    delivered: tuple[int, ...] = ()
    speculation: Speculation = Speculation()
    logprobs: int = -1
    request_class: str = ""
    gather_s: float = 0.0


class CutRequest(Message, frozen=True):
    """A stop string ended the request after `output_len` tokens: stop now, count no token after them."""

    request_id: str
    output_len: int


class CancelRequest(Message, frozen=True):
    """The client went away: close the sequence on every holder."""

    request_id: str


class Delivered(Message, frozen=True):
    """Newly committed output tokens; `from_index` is the output index of the first. The last one carries the reason.

    `logprobs`: one per token, where the request asked for them.
    """

    request_id: str
    from_index: int
    tokens: tuple[int, ...]
    finish_reason: FinishReason | None = None
    metrics: SpecMetrics | None = None
    logprobs: tuple[Logprobs, ...] = ()


class Failed(Message, frozen=True):
    """The request ends with an error: `code` as in HTTP (400, 408, 429, 503), `param` the field at fault."""

    request_id: str
    code: int
    message: str
    param: str | None = None
    retry_after_s: float | None = None


# ------------------------------------------------------------------------------------------- router and coordinator


class Admit(Message, frozen=True):
    """Ask for room: a replica of each of `models` (none named: of every model) that has some for `max_len` tokens, the
    target's required.

    `replaces` is the older sequence of the same request; it is closed first. `preferred`: by model, the replicas that
    the router would like best, the best one first.
    """

    seq: int
    prompt_len: int
    max_len: int
    replaces: int | None = None
    preferred: dict[str, tuple[str, ...]] = {}
    models: tuple[str, ...] = ()


class Admitted(Message, frozen=True):
    """`holders`: model name → replica id that holds room. `refusal` set: why there will be none; `code` as in HTTP:
    400 no replica could ever hold it, 429 the queue is full, 503 the sequence is closed.
    """

    seq: int
    holders: dict[str, str]
    refusal: str | None = None
    code: int = 0


class Resume(Message, frozen=True):
    """After the coordinator restarted: a sequence that is running, with all it committed and who holds it."""

    seq: int
    epoch: int
    tokens: tuple[int, ...]
    max_len: int
    holders: dict[str, str]


class Committed(Message, frozen=True):
    """The target's verdict of round `epoch`: `tokens` from position `from_len` on are permanent."""

    seq: int
    epoch: int
    from_len: int
    tokens: tuple[int, ...]


class Finish(Message, frozen=True):
    """The request ended: close the sequence on every holder."""

    seq: int


class ReplicaInfo(Value, frozen=True):
    """What a replica says of itself when it registers. `address` is host:port of its gRPC server.

    `prompt_tokens`: how much of a prompt's end it reads; 0 for all of it.
    """

    replica_id: str
    model: str
    node: str
    address: str
    vocabulary: str
    context_len: int
    block_tokens: int
    num_blocks: int
    profile: Profile
    prompt_tokens: int = 0


class ReplicaCounts(Value, frozen=True):
    """What a replica counted since it started; `bad_frames` by reason."""

    rolled_back_tokens: int = 0
    stale_messages: int = 0
    resent_prefixes: int = 0
    bad_frames: dict[str, int] = {}


class Member(Value, frozen=True):
    """A replica as the coordinator sees it now."""

    info: ReplicaInfo
    up: bool
    sequences: int
    free_blocks: int
    counts: ReplicaCounts = ReplicaCounts()


class Members(Message, frozen=True):
    """The whole membership, sent on every change of who is up and with each report interval."""

    members: tuple[Member, ...]


# ------------------------------------------------------------------------------------------------ router and replica


class Open(Message, frozen=True):
    """A sequence begins on this holder: its committed tokens so far and how to sample. Idempotent; computes nothing.

    The first `prompt_len` tokens are the prompt, the rest is output that was committed before.
    """

    seq: int
    tokens: tuple[int, ...]
    prompt_len: int
    sampling: Sampling


class Draft(Message, frozen=True):
    """Continue the sequence by `count` own samples. `count` 0 only computes KV (a drafter's prefill).

    `stop_below`: a model that knows how likely its samples are right ends the draft where all of it together would be
    right with a smaller probability. `num_guesses`: how many tokens it states for each position.
    """

    seq: int
    key: Key
    committed_len: int
    from_len: int
    tokens: tuple[int, ...]
    count: int
    stop_below: float = 0.0
    num_guesses: int = 0


class Check(Message, frozen=True):
    """Compare the last `count` tokens with own samples, keep the equal ones, add the own token after them.

    `parents`: where the checked tokens are a tree, for each of them the index among them of the one that it follows,
    smaller than its own, or −1 where it follows the token before them all. Empty: each follows the one before it.
    `count` 0 is a plain decoding step, and the prefill of a new sequence. `logprobs` as in `OpenRequest`; `num_top`:
    how many likeliest tokens each row states, for estimates. Only the target is asked for either.
    """

    seq: int
    key: Key
    committed_len: int
    from_len: int
    tokens: tuple[int, ...]
    count: int
    logprobs: int = -1
    num_top: int = 0
    parents: tuple[int, ...] = ()


class Probe(Message, frozen=True):
    """Own samples at the last `count` positions of the committed tokens, for estimates only; changes no token.

    `stop_below`: no sample where a draft of one token would end before it. `num_top`: how many likeliest tokens are
    stated at each position.
    """

    seq: int
    key: Key
    committed_len: int
    from_len: int
    tokens: tuple[int, ...]
    count: int
    stop_below: float = 0.0
    num_top: int = 0


class Opened(Message, frozen=True):
    seq: int
    committed_len: int
    kv_len: int


class Drafted(Message, frozen=True):
    """`tokens`: at most `count` samples; fewer where the model has no guess (n-gram) or sampled one that ends it.

    `guesses`: of each token's position, if asked for.
    """

    seq: int
    key: Key
    tokens: tuple[int, ...]
    committed_len: int
    kv_len: int
    timing: Timing
    guesses: tuple[Guesses, ...] = ()


class Verdict(Message, frozen=True):
    """`num_accepted` of the checked tokens equal own samples; `own_token` is the sample after them.

    `logprobs` and `tops`: of the accepted tokens and the own one, if asked for. `path`: of a tree, the indices of the
    accepted tokens among the checked ones, in order.
    """

    seq: int
    key: Key
    num_accepted: int
    own_token: int
    committed_len: int
    kv_len: int
    timing: Timing
    logprobs: tuple[Logprobs, ...] = ()
    tops: tuple[Top, ...] = ()
    path: tuple[int, ...] = ()


class Probed(Message, frozen=True):
    """`samples[i]`: what the model samples at position `from_len + i`, given the committed tokens before it.

    `tops[i]`: the likeliest tokens there; none at all if not asked for.
    """

    seq: int
    key: Key
    from_len: int
    samples: tuple[int | None, ...]
    committed_len: int
    kv_len: int
    timing: Timing
    tops: tuple[Top, ...] = ()


class Need(Message, frozen=True):
    """The holder lacks tokens from `from_len` on and did no work; 0 with `unknown` means that it was never opened."""

    seq: int
    key: Key
    from_len: int
    unknown: bool = False


# ------------------------------------------------------------------------------------------- coordinator and replica


class Commit(Message, frozen=True):
    """Raise `committed_len` to `from_len + len(tokens)`; drop cached positions that differ. Runs no model. No key."""

    seq: int
    epoch: int
    from_len: int
    tokens: tuple[int, ...]


class Close(Message, frozen=True):
    """Free the sequence. Acknowledged also when it is unknown."""

    seq: int


class Held(Value, frozen=True):
    """One sequence of a holder: how many tokens it knows as committed, how many rows of KV it has computed."""

    seq: int
    committed_len: int
    kv_len: int


class Register(Message, frozen=True):
    """A replica announces itself and what it holds; the first message of its stream to the coordinator."""

    info: ReplicaInfo
    held: tuple[Held, ...]


class Report(Message, frozen=True):
    """A replica's heartbeat: free + evictable blocks, and sequences it dropped to length 0 since the last one."""

    free_blocks: int
    sequences: int
    dropped: tuple[int, ...] = ()
    counts: ReplicaCounts = ReplicaCounts()


class Acked(Message, frozen=True):
    """Lengths after a commit: `committed_len` tokens known, `kv_len` rows computed; `unknown`: never opened here."""

    seq: int
    committed_len: int
    kv_len: int
    unknown: bool = False


class Closed(Message, frozen=True):
    seq: int


AnyMessage = (
    OpenRequest
    | CutRequest
    | CancelRequest
    | Delivered
    | Failed
    | Admit
    | Admitted
    | Resume
    | Committed
    | Finish
    | Members
    | Open
    | Draft
    | Check
    | Probe
    | Opened
    | Drafted
    | Verdict
    | Probed
    | Need
    | Commit
    | Close
    | Register
    | Report
    | Acked
    | Closed
)


def given_tokens(step: "Step") -> tuple[int, ...]:
    """The tokens of a step that follow one another: without the nodes of a tree."""
    is_tree = isinstance(step, Check) and step.parents
    return step.tokens[: -step.count] if is_tree else step.tokens


Step = Draft | Check | Probe
"""Messages that make a replica's engine work on one sequence, in the order of their keys."""

StepReply = Drafted | Verdict | Probed | Need
