"""Every name of spans, events, attributes and metrics as a constant; what each means is said once, in ``registry.yaml``.

A constant is the plain string. One that the registry doesn't list is an error at import. :data:`SPANS` and :data:`ATTRIBUTES`
are what the registry says, for documentation and tests.
"""

from __future__ import annotations

from typing import NamedTuple

from tracekv.views.registry import registry


class SpanName(NamedTuple):
    """A span's name and what it stands for. Callbacks' spans have the contract's method names."""

    name: str
    meaning: str


class AttributeName(NamedTuple):
    """An attribute's name, type (``str``, ``int``, ``bool``, ``str[]`` or ``int[]``), UCUM unit or "", and meaning."""

    name: str
    type: str
    unit: str
    meaning: str


_known = registry()
SPANS: dict[str, SpanName] = {name: SpanName(name, meaning) for name, meaning in _known.spans.items()}
ATTRIBUTES: dict[str, AttributeName] = {
    name: AttributeName(name, entry.type, entry.unit, entry.meaning) for name, entry in _known.attributes.items()
}


def _listed(kind: str, name: str) -> str:
    if name not in getattr(_known, kind):
        raise KeyError(f"tracekv: {name} isn't listed among the {kind} of tracekv/views/registry.yaml")
    return name


def _span(name: str) -> str:
    return _listed("spans", name)


def _event(name: str) -> str:
    return _listed("events", name)


def _attribute(name: str) -> str:
    return _listed("attributes", name)


def _metric(name: str) -> str:
    return _listed("metrics", name)


# Spans ------------------------------------------------------------------------------------------------------------------------

REQUEST = _span("request")
LOAD = _span("load")
SAVE = _span("save")
LOOKUP = _span("lookup")
DROP = _span("drop")
STEP = _span("step")
BRING_UP = _span("bring_up")
TRACER_FAULT = _span("tracer_fault")
FINDING = _span("finding")
#: Prefix of a store operation's span: ``store.put``, ``store.read``, ...
STORE = "store."

#: Names of span events.
EVENT_DROP = _event("drop")
EVENT_PREFETCH = _event("prefetch")
EVENT_RESET = _event("request_reset")
EVENT_SAVED = _event("saving_finished")
EVENT_LOADED = _event("loading_finished")
EVENT_FINDING = _event("finding")

# Attributes of OpenTelemetry's conventions ------------------------------------------------------------------------------------

ERROR_TYPE = _attribute("error.type")
CODE_FUNCTION = _attribute("code.function.name")
CODE_FILE = _attribute("code.file.path")
CODE_LINE = _attribute("code.line.number")
S3_BUCKET = _attribute("aws.s3.bucket")
GEN_AI_REQUEST_ID = _attribute("gen_ai.request.id")

# Where and when ---------------------------------------------------------------------------------------------------------------

CALLBACK = _attribute("tracekv.callback")
CALLS = _attribute("tracekv.calls")
SUM_NS = _attribute("tracekv.time.sum_ns")
MAX_NS = _attribute("tracekv.time.max_ns")
RANK = _attribute("tracekv.rank")
WORLD = _attribute("tracekv.world")
STEP_NUMBER = _attribute("tracekv.step")
RUN = _attribute("tracekv.run")
HOST = _attribute("tracekv.host")
PID = _attribute("tracekv.pid")
RECORDS_LOST = _attribute("tracekv.records_lost")

# Pages and bytes --------------------------------------------------------------------------------------------------------------

PAGES = _attribute("tracekv.pages")
PAGES_ABSENT = _attribute("tracekv.pages.absent")
BYTES = _attribute("tracekv.bytes")
SOURCE = _attribute("tracekv.source")
DIRECTION = _attribute("tracekv.direction")
TIER = _attribute("tracekv.tier")
TOKENS = _attribute("tracekv.tokens")
BLOCKS = _attribute("tracekv.blocks")
LAYER = _attribute("tracekv.layer")
GROUP = _attribute("tracekv.layer_group.id")
GROUPS = _attribute("tracekv.layer_group.ids")
GROUP_PAGES = _attribute("tracekv.layer_group.pages")
GROUP_BYTES = _attribute("tracekv.layer_group.bytes")
GROUP_WINDOW = _attribute("tracekv.layer_group.window")
GROUP_PAGE_BYTES = _attribute("tracekv.layer_group.bytes_per_page")
GROUP_SLOTS = _attribute("tracekv.layer_group.slots")
GROUP_LAYERS = _attribute("tracekv.layer_group.layers")
GROUP_TOKENS = _attribute("tracekv.layer_group.tokens")
GROUP_LOAD_BYTES = _attribute("tracekv.layer_group.load_bytes")
GROUP_SAVE_BYTES = _attribute("tracekv.layer_group.save_bytes")
LOAD_PAGES = _attribute("tracekv.load.pages")
LOAD_BYTES = _attribute("tracekv.load.bytes")
SAVE_PAGES = _attribute("tracekv.save.pages")
SAVE_BYTES = _attribute("tracekv.save.bytes")
LOAD_TIERS = _attribute("tracekv.load.tiers")
SAVE_TIERS = _attribute("tracekv.save.tiers")
BLOCK_TOKENS = _attribute("tracekv.tokens_per_block")
DTYPE = _attribute("tracekv.dtype")

# A request's story ------------------------------------------------------------------------------------------------------------

REQUEST_ID = _attribute("tracekv.request.id")
REQUEST_PART = _attribute("tracekv.request.part")
OUTCOME = _attribute("tracekv.request.outcome")
QUERIES = _attribute("tracekv.request.queries")
PROMPT_TOKENS = _attribute("tracekv.prompt_tokens")
COMPUTED_TOKENS = _attribute("tracekv.computed_tokens")
STORED_TOKENS = _attribute("tracekv.stored_tokens")
STAGED_TOKENS = _attribute("tracekv.staged_tokens")
OFFERED_TOKENS = _attribute("tracekv.offered_tokens")
HONOURED_TOKENS = _attribute("tracekv.honoured_tokens")
LOADED_TOKENS = _attribute("tracekv.loaded_tokens")
SAVED_TOKENS = _attribute("tracekv.saved_tokens")
IS_ASYNC = _attribute("tracekv.is_async")
MISS_REASON = _attribute("tracekv.miss_reason")
BOUNDING_GROUP = _attribute("tracekv.bounding_layer_group")
KEY = _attribute("tracekv.key")
KEEPS_PAGES = _attribute("tracekv.keeps_pages")
HELD_PAGES = _attribute("tracekv.held.pages")
HELD_NS = _attribute("tracekv.held.time_ns")
ANSWER = _attribute("tracekv.answer")
LORA = _attribute("tracekv.lora_id")
CANCEL_START = _attribute("tracekv.cancel.start")
CANCEL_END = _attribute("tracekv.cancel.end")

# Parts of the time ------------------------------------------------------------------------------------------------------------

ENQUEUED_NS = _attribute("tracekv.time.enqueued_ns")
QUERY_NS = _attribute("tracekv.time.query_ns")
WAITED_NS = _attribute("tracekv.time.waited_ns")
COMMIT_TO_OFFER_NS = _attribute("tracekv.time.commit_to_offer_ns")
QUEUED_NS = _attribute("tracekv.time.queued_ns")
READ_NS = _attribute("tracekv.time.read_ns")
VERIFY_NS = _attribute("tracekv.time.verify_ns")
COPY_NS = _attribute("tracekv.time.copy_ns")
STALL_NS = _attribute("tracekv.time.stall_ns")
TRANSFER_NS = _attribute("tracekv.time.transfer_ns")

# Steps and metadata -----------------------------------------------------------------------------------------------------------

REQUESTS = _attribute("tracekv.requests")
NEW_REQUESTS = _attribute("tracekv.new_requests")
SCHEDULED_TOKENS = _attribute("tracekv.scheduled_tokens")
HAS_METADATA = _attribute("tracekv.metadata.present")
HAS_ENVELOPE = _attribute("tracekv.metadata.envelope")
METADATA_BYTES = _attribute("tracekv.metadata.bytes")
METADATA_DIGEST = _attribute("tracekv.metadata.digest")
SAVING_GIVEN = _attribute("tracekv.saving.given")
SAVING_RETURNED = _attribute("tracekv.saving.returned")
LOADING_GIVEN = _attribute("tracekv.loading.given")
LOADING_RETURNED = _attribute("tracekv.loading.returned")
HAS_CALLABLE = _attribute("tracekv.has_callable")
INSTRUMENT = _attribute("tracekv.instrument")
NOT_IMPLEMENTED = _attribute("tracekv.not_implemented")

# Store operations -------------------------------------------------------------------------------------------------------------

STORE_ENGINE = _attribute("tracekv.store.engine")
STORE_OUTCOME = _attribute("tracekv.store.outcome")
STORE_ATTEMPTS = _attribute("tracekv.store.attempts")
STORE_REQUESTS = _attribute("tracekv.store.requests")
STORE_BREAKER = _attribute("tracekv.store.breaker")
PROMPT_HIT = _attribute("tracekv.prompt.hit")
REASON = _attribute("tracekv.reason")
RULE = _attribute("tracekv.rule")
SEVERITY = _attribute("tracekv.severity")
SUBJECT = _attribute("tracekv.subject")
WHAT = _attribute("tracekv.what")
CAUSED_BY = _attribute("tracekv.caused_by")
RULES_BROKEN = _attribute("tracekv.rules")
FATE = _attribute("tracekv.prefetch.fate")
LEAD_NS = _attribute("tracekv.prefetch.lead_ns")

# Metrics ----------------------------------------------------------------------------------------------------------------------

SETTINGS_DIGEST = _attribute("tracekv.settings.digest")
OPERATION = _attribute("tracekv.operation")
SIGNAL = _attribute("tracekv.signal")

METRIC_TRANSFER_IO = _metric("tracekv.transfer.io")
METRIC_TRANSFER_PAGES = _metric("tracekv.transfer.pages")
METRIC_TRANSFER_DURATION = _metric("tracekv.transfer.duration")
METRIC_TRANSFER_ERRORS = _metric("tracekv.transfer.errors")
METRIC_TRANSFER_STALL = _metric("tracekv.transfer.stall")
METRIC_TRANSFER_TIME = _metric("tracekv.transfer.time")
METRIC_TRANSFER_HIDDEN = _metric("tracekv.transfer.hidden")
METRIC_CALLBACK_ABSENT_PAGES = _metric("tracekv.callback.absent_pages")
METRIC_PROMPTS = _metric("tracekv.prompts")
METRIC_PROMPT_TOKENS_QUERIED = _metric("tracekv.prompt.tokens.queried")
METRIC_PROMPT_TOKENS_COMPUTED = _metric("tracekv.prompt.tokens.computed")
METRIC_PROMPT_TOKENS_OFFERED = _metric("tracekv.prompt.tokens.offered")
METRIC_PROMPT_TOKENS_HONOURED = _metric("tracekv.prompt.tokens.honoured")
METRIC_PROMPT_TOKENS_LOADED = _metric("tracekv.prompt.tokens.loaded")
METRIC_PROMPT_TOKENS_SAVED = _metric("tracekv.prompt.tokens.saved")
METRIC_PROMPT_WAIT = _metric("tracekv.prompt.wait")
METRIC_PROMPT_DURATION = _metric("tracekv.prompt.duration")
METRIC_LOOKUPS = _metric("tracekv.lookups")
METRIC_LOOKUP_MISSES = _metric("tracekv.lookup.misses")
METRIC_LOOKUP_BOUNDED = _metric("tracekv.lookup.bounded")
METRIC_LOOKUP_WAIT = _metric("tracekv.lookup.wait")
METRIC_LOOKUP_COMMIT_TO_OFFER = _metric("tracekv.lookup.commit_to_offer")
METRIC_CALLBACK_DURATION = _metric("tracekv.callback.duration")
METRIC_CALLBACK_EXCEPTIONS = _metric("tracekv.callback.exceptions")
METRIC_PASSES = _metric("tracekv.passes")
METRIC_LAYER_HOOK_EXPECTED = _metric("tracekv.layer_hook.expected")
METRIC_LAYER_HOOK_SEEN = _metric("tracekv.layer_hook.seen")
METRIC_LAYER_HOOK_TIME = _metric("tracekv.layer_hook.time")
METRIC_REQUEST_IN_FLIGHT = _metric("tracekv.request.in_flight")
METRIC_REQUEST_IN_FLIGHT_AGE = _metric("tracekv.request.in_flight_age")
METRIC_HELD_PAGES = _metric("tracekv.held.pages")
METRIC_HELD_AGE = _metric("tracekv.held.age")
METRIC_FINISHED_SKEW = _metric("tracekv.finished.skew")
METRIC_FINISHED_LAST = _metric("tracekv.finished.last")
METRIC_STORE_OPERATION_DURATION = _metric("tracekv.store.operation.duration")
METRIC_STORE_OPERATIONS = _metric("tracekv.store.operations")
METRIC_STORE_ATTEMPTS = _metric("tracekv.store.attempts")
METRIC_STORE_REQUESTS = _metric("tracekv.store.requests")
METRIC_STORE_IO = _metric("tracekv.store.io")
METRIC_STORE_BREAKER_STATE = _metric("tracekv.store.breaker_state")
METRIC_STORE_CEILING = _metric("tracekv.store.ceiling")
METRIC_DROP_IO = _metric("tracekv.drop.io")
METRIC_DROP_BLOCKS = _metric("tracekv.drop.blocks")
METRIC_PREFETCH_IO = _metric("tracekv.prefetch.io")
METRIC_PREFETCH_BLOCKS = _metric("tracekv.prefetch.blocks")
METRIC_PREFETCH_LEAD = _metric("tracekv.prefetch.lead")
METRIC_PROCESSES = _metric("tracekv.processes")
METRIC_SETTINGS_INFO = _metric("tracekv.settings.info")
METRIC_SETTINGS_DIFFERING = _metric("tracekv.settings.differing")
METRIC_TRACER_RECORDS_READ = _metric("tracekv.tracer.records.read")
METRIC_TRACER_RECORDS_LOST = _metric("tracekv.tracer.records.lost")
METRIC_TRACER_RECORDS_UNDECODABLE = _metric("tracekv.tracer.records.undecodable")
METRIC_TRACER_WRITTEN = _metric("tracekv.tracer.written")
METRIC_TRACER_LAG = _metric("tracekv.tracer.lag")
METRIC_TRACER_FAULTS = _metric("tracekv.tracer.faults")
METRIC_FINDINGS = _metric("tracekv.findings")
METRIC_TRACER_COST = _metric("tracekv.tracer.cost")
METRIC_TRACER_REDUCED = _metric("tracekv.tracer.reduced")
METRIC_TRACER_CPU = _metric("tracekv.tracer.cpu")
METRIC_TRACER_EXPORTED = _metric("tracekv.tracer.exported")
METRIC_TRACER_EXPORT_FAILED = _metric("tracekv.tracer.export.failed")
METRIC_TRACER_VIEW_FAULTS = _metric("tracekv.tracer.view_faults")
