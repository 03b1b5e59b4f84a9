"""The runtime's callbacks, and what is summed up of them."""

from __future__ import annotations

from tracekv.journal.records.base import Record


class Call(Record, tag=10):
    """A callback of the runtime, with nothing to add: what every other call record begins with.

    Attributes:
        callback: ``vocabulary.Callback``.
        error: Class name of what the inner connector raised, else None.
    """

    callback: int
    started_ns: int
    ended_ns: int
    step: int
    error: str | None


class QueryCall(Call, tag=11):
    """``get_num_new_matched_tokens``. ``answer`` names the types when the answer is no ``(int, bool)``, else None."""

    request_id: int
    client_id: int | None
    prompt_tokens: int | None
    computed_tokens: int
    offered_tokens: int
    is_async: bool
    answer: str | None
    salt_digest: bytes | None
    multimodal_digest: bytes | None
    lora_id: int | None


class AllocCall(Call, tag=12):
    """``update_state_after_alloc`` and its per-layer-group form.

    Attributes:
        is_never_asked: The request is of a kind that the runtime doesn't ask about (a dummy, or it only generates); None where its
            object doesn't say.
    """

    request_id: int
    honoured_tokens: int | None
    pages: list[list[int]]
    is_never_asked: bool | None = None


class BuildCall(Call, tag=13):
    """``build_connector_meta``; lists are parallel, the first ``new_requests`` entries are new ones.

    Attributes:
        prompt_tokens: Tokens of the first report, for the new requests only.
        pages: ``(position in request_ids, new page slots per layer group)`` where there are any.
        has_metadata: False where the connector returned None or something empty.
    """

    new_requests: int
    request_ids: list[int]
    computed_positions: list[int]
    scheduled_tokens: list[int]
    prompt_tokens: list[int]
    pages: list[tuple[int, list[list[int]]]]
    has_metadata: bool


class FinishCall(Call, tag=14):
    """``request_finished`` and its per-layer-group form; ``keeps_pages`` is the truth of the answer."""

    request_id: int
    keeps_pages: bool
    answer: str | None
    pages: list[list[int]]


class BindCall(Call, tag=15):
    """``bind_connector_meta``. Size and digest are of the pickled metadata, None where nothing was pickled."""

    has_envelope: bool
    nbytes: int | None
    digest: bytes | None


class FinishedCall(Call, tag=16):
    """``get_finished`` that was given ids or returned some."""

    saving_given: list[int]
    loading_given: list[int]
    saving_returned: list[int]
    loading_returned: list[int]
    answer: str | None


class IdlePolls(Record, tag=17):
    """Consecutive ``get_finished`` calls with nothing in and nothing out."""

    step: int
    count: int
    sum_ns: int
    max_ns: int
    first_started_ns: int
    last_ended_ns: int


class LayerHooks(Record, tag=18):
    """The per-layer hooks of one forward pass.

    Attributes:
        waits, saves: int64 pairs ``(started_ns, ended_ns)``, native byte order; pair i is layer i's. (0, 0): not called;
            an end of 0: entered and not left (it raised, when a later record exists).
        in_seconds: As the engine writes it: the pairs are float64, in seconds of the same clock. :func:`decode` turns them.
    """

    step: int
    waits: bytes
    saves: bytes
    in_seconds: bool = False


class RegionFacts(Record):
    """One byte range of a page."""

    size: int
    stride: int
    num_slots: int


class GroupFacts(Record):
    """One layer group of the registered caches."""

    layer_group_id: int
    window_size: int | None
    layer_ids: list[int]
    num_slots: int
    bytes_per_page: int
    regions: list[RegionFacts]


class RegisterCall(Call, tag=19):
    """``register_kv_caches`` or ``register_kv_cache_layout``; ``tokens_per_block`` 0 means that it isn't told."""

    tokens_per_block: int
    dtype: str
    groups: list[GroupFacts]


class ForwardCallableCall(Call, tag=20):
    """``register_forward_pass_callable``: whether it gave one."""

    has_callable: bool


class CancelLoadCall(Call, tag=21):
    """``cancel_load`` (newer runtimes): tokens ``[start, end)`` of an offer are not wanted."""

    request_id: int
    start: int
    end: int


class RequestResetCall(Call, tag=22):
    """``request_reset`` (newer runtimes): the request is going to be replayed."""

    request_id: int


class CallCounts(Record, tag=23):
    """What the calls since ``started_ns`` add up to while only counters are kept: ``(callback, calls, sum_ns, max_ns)``."""

    step: int
    started_ns: int
    ended_ns: int
    callbacks: list[tuple[int, int, int, int]]
