"""Every span and attribute name that the views emit, in one place, with type, unit and one line of meaning.

OpenTelemetry's own conventions where one fits (``error.type``, ``code.*``, ``aws.s3.*``, ``gen_ai.*``), ``tracekv.*`` otherwise. Units
are UCUM, times in nanoseconds say so in their name. A constant is the plain string; :data:`SPANS` and :data:`ATTRIBUTES` are
the registry that documentation and tests read.
"""

from __future__ import annotations

from typing import NamedTuple


class SpanName(NamedTuple):
    """A span's name and what it stands for. Callbacks' spans have the contract's method names instead."""

    name: str
    meaning: str


class AttributeName(NamedTuple):
    """An attribute's name, type (``str``, ``int``, ``bool``, ``str[]`` or ``int[]``), UCUM unit or "", and meaning."""

    name: str
    type: str
    unit: str
    meaning: str


SPANS: dict[str, SpanName] = {}
ATTRIBUTES: dict[str, AttributeName] = {}


def _span(name: str, meaning: str) -> str:
    SPANS[name] = SpanName(name, meaning)
    return name


def _attribute(name: str, kind: str, unit: str, meaning: str) -> str:
    ATTRIBUTES[name] = AttributeName(name, kind, unit, meaning)
    return name


# Spans ------------------------------------------------------------------------------------------------------------------------

REQUEST = _span("request", "Root of a request's trace: from enqueue or first query until its pages are given back")
LOAD = _span("load", "KV of one layer group moved into pages of a request")
SAVE = _span("save", "KV of one layer group moved out of pages of a request")
LOOKUP = _span("lookup", "The connector's search for what it can offer")
DROP = _span("drop", "Blocks given up after their request's span had ended; an event of that span before")
STEP = _span("step", "Root of a step's trace: from build_connector_meta to the last callback of the pass")
BRING_UP = _span("bring_up", "Root of a process's own trace: from its start to the last callback before the first pass")
TRACER_FAULT = _span("tracer_fault", "An instrument of tracekv failed and was removed")
#: Prefix of a store operation's span: ``store.put``, ``store.read``, ...
STORE = "store."
for _operation in ("put", "read", "list", "head", "delete"):
    _span(STORE + _operation, f"One logical {_operation} on a store, its attempts included")

#: Names of span events.
EVENT_DROP = "drop"
EVENT_PREFETCH = "prefetch"
EVENT_RESET = "request_reset"
EVENT_SAVED = "saving_finished"
EVENT_LOADED = "loading_finished"

# Attributes of OpenTelemetry's conventions ------------------------------------------------------------------------------------

ERROR_TYPE = _attribute(
    "error.type", "str", "", "Class of the exception, or how an operation failed; absent on success"
)
CODE_FUNCTION = _attribute("code.function.name", "str", "", "The inner connector's method")
CODE_FILE = _attribute("code.file.path", "str", "", "File that defines it; on the constructor's span")
CODE_LINE = _attribute("code.line.number", "int", "", "Line in that file")
S3_BUCKET = _attribute("aws.s3.bucket", "str", "", "Bucket of a store operation")
GEN_AI_REQUEST_ID = _attribute("gen_ai.request.id", "str", "", "The id by which the front process knows the request")

# Where and when ---------------------------------------------------------------------------------------------------------------

CALLBACK = _attribute("tracekv.callback", "str", "", "scheduler.NAME or worker.NAME, with the contract's method name")
CALLS = _attribute("tracekv.calls", "int", "{call}", "Calls that the span stands for; 1 where absent")
SUM_NS = _attribute("tracekv.time.sum_ns", "int", "ns", "Time inside these calls, together")
MAX_NS = _attribute("tracekv.time.max_ns", "int", "ns", "The longest of them")
RANK = _attribute(
    "tracekv.rank", "int", "", "Rank that the span happened on, or whose shard a store operation is about"
)
WORLD = _attribute("tracekv.world", "int", "", "Number of ranks")
STEP_NUMBER = _attribute(
    "tracekv.step", "int", "", "Number of the pass, counted by the leader from 1; 0 before the first"
)
RUN = _attribute("tracekv.run", "str", "", "Digest of the run id, equal on every rank; absent where no run id was seen")
HOST = _attribute("tracekv.host", "str", "", "Host of the process")
PID = _attribute("tracekv.pid", "int", "", "Process number")
RECORDS_LOST = _attribute(
    "tracekv.records_lost",
    "int",
    "{record}",
    "Records overwritten unread while the span was open: it may be incomplete",
)

# Pages and bytes --------------------------------------------------------------------------------------------------------------

PAGES = _attribute("tracekv.pages", "int", "{page}", "Pages that hold KV, all layer groups together")
PAGES_ABSENT = _attribute("tracekv.pages.absent", "int", "{page}", "Blocks without a page (-1)")
BYTES = _attribute("tracekv.bytes", "int", "By", "Bytes of these pages; absent where a page's size isn't known")
SOURCE = _attribute("tracekv.source", "str", "", "How bytes are known: reported, observed, planned or eligible")
DIRECTION = _attribute("tracekv.direction", "str", "", "load or save, seen from the device")
TIER = _attribute("tracekv.tier", "str", "", "Where KV came from or went to: host, disk, object or remote")
TOKENS = _attribute("tracekv.tokens", "int", "{token}", "Tokens whose KV moved")
BLOCKS = _attribute("tracekv.blocks", "int", "{block}", "Blocks")
LAYER = _attribute("tracekv.layer", "int", "", "Layer of a per-layer hook")
GROUP = _attribute("tracekv.layer_group.id", "int", "", "The layer group; -1 where the layout doesn't name it")
GROUPS = _attribute("tracekv.layer_group.ids", "int[]", "", "Layer groups, parallel to the lists below")
GROUP_PAGES = _attribute("tracekv.layer_group.pages", "int[]", "{page}", "Pages that hold KV, by layer group")
GROUP_BYTES = _attribute("tracekv.layer_group.bytes", "int[]", "By", "Bytes of these pages, by layer group")
GROUP_WINDOW = _attribute(
    "tracekv.layer_group.window", "int[]", "{token}", "Window; 0 for full attention, -1 where the layout doesn't tell"
)
GROUP_PAGE_BYTES = _attribute("tracekv.layer_group.bytes_per_page", "int[]", "By", "Bytes of one page, by layer group")
GROUP_SLOTS = _attribute("tracekv.layer_group.slots", "int[]", "{page}", "Page slots, by layer group")
GROUP_LAYERS = _attribute("tracekv.layer_group.layers", "int[]", "{layer}", "Number of layers, by layer group")
GROUP_TOKENS = _attribute("tracekv.layer_group.tokens", "int[]", "{token}", "Longest stored prefix, by layer group")
GROUP_LOAD_BYTES = _attribute("tracekv.layer_group.load_bytes", "int[]", "By", "Bytes loaded, by layer group")
GROUP_SAVE_BYTES = _attribute("tracekv.layer_group.save_bytes", "int[]", "By", "Bytes saved, by layer group")
LOAD_PAGES = _attribute("tracekv.load.pages", "int", "{page}", "Pages loaded, as reported")
LOAD_BYTES = _attribute("tracekv.load.bytes", "int", "By", "Bytes loaded, as reported")
SAVE_PAGES = _attribute("tracekv.save.pages", "int", "{page}", "Pages saved, as reported")
SAVE_BYTES = _attribute("tracekv.save.bytes", "int", "By", "Bytes saved, as reported")
LOAD_TIERS = _attribute("tracekv.load.tiers", "str[]", "", "Tiers that KV was loaded from")
SAVE_TIERS = _attribute("tracekv.save.tiers", "str[]", "", "Tiers that KV was saved to")
BLOCK_TOKENS = _attribute("tracekv.tokens_per_block", "int", "{token}", "Tokens of a block; absent where it isn't told")
DTYPE = _attribute("tracekv.dtype", "str", "", "Element type of the registered caches")

# A request's story ------------------------------------------------------------------------------------------------------------

REQUEST_ID = _attribute("tracekv.request.id", "str", "", "Request id of the engine, or its digest where ids are hashed")
REQUEST_PART = _attribute(
    "tracekv.request.part", "int", "", "Part of a story that went on after it had ended; 0 if absent"
)
OUTCOME = _attribute("tracekv.request.outcome", "str", "", "finished, or abandoned where no end was announced")
QUERIES = _attribute(
    "tracekv.request.queries", "int", "{query}", "How often the request was queried; more than 1: replayed"
)
PROMPT_TOKENS = _attribute("tracekv.prompt_tokens", "int", "{token}", "Prompt tokens queried")
COMPUTED_TOKENS = _attribute("tracekv.computed_tokens", "int", "{token}", "Of them, already computed on the device")
STORED_TOKENS = _attribute("tracekv.stored_tokens", "int", "{token}", "Longest prefix stored for every group and rank")
STAGED_TOKENS = _attribute(
    "tracekv.staged_tokens", "int", "{token}", "Of it, in memory and verified at the query's end"
)
OFFERED_TOKENS = _attribute("tracekv.offered_tokens", "int", "{token}", "Tokens the connector offered")
HONOURED_TOKENS = _attribute(
    "tracekv.honoured_tokens", "int", "{token}", "Of them, taken by the runtime; absent if untold"
)
LOADED_TOKENS = _attribute("tracekv.loaded_tokens", "int", "{token}", "Tokens whose KV was loaded, as reported")
SAVED_TOKENS = _attribute("tracekv.saved_tokens", "int", "{token}", "Tokens whose KV was saved, as reported")
IS_ASYNC = _attribute("tracekv.is_async", "bool", "", "Whether the offer parks the request until it is loaded")
MISS_REASON = _attribute(
    "tracekv.miss_reason", "str", "", "Why nothing, or not more, was offered; absent for a full hit"
)
BOUNDING_GROUP = _attribute("tracekv.bounding_layer_group", "int", "", "Layer group that ended the stored prefix")
KEY = _attribute("tracekv.key", "str", "", "Digest of the last block that could be offered, or of an object's path")
KEEPS_PAGES = _attribute("tracekv.keeps_pages", "bool", "", "Whether request_finished asked to keep the pages")
HELD_PAGES = _attribute("tracekv.held.pages", "int", "{page}", "Pages kept after request_finished")
HELD_NS = _attribute("tracekv.held.time_ns", "int", "ns", "For how long, until get_finished gave the id back")
ANSWER = _attribute("tracekv.answer", "str", "", "Types of an answer that isn't what the contract says")
LORA = _attribute("tracekv.lora_id", "int", "", "LoRA task of the request")
CANCEL_START = _attribute("tracekv.cancel.start", "int", "{token}", "First token of an offer that isn't wanted")
CANCEL_END = _attribute("tracekv.cancel.end", "int", "{token}", "End of the tokens that aren't wanted")

# Parts of the time ------------------------------------------------------------------------------------------------------------

ENQUEUED_NS = _attribute("tracekv.time.enqueued_ns", "int", "ns", "From the request's enqueue to its first query")
QUERY_NS = _attribute("tracekv.time.query_ns", "int", "ns", "Inside get_num_new_matched_tokens")
WAITED_NS = _attribute("tracekv.time.waited_ns", "int", "ns", "Of a lookup, waiting for bytes to be staged")
QUEUED_NS = _attribute("tracekv.time.queued_ns", "int", "ns", "Waiting in a queue")
READ_NS = _attribute("tracekv.time.read_ns", "int", "ns", "Reading from the tier")
VERIFY_NS = _attribute("tracekv.time.verify_ns", "int", "ns", "Checking what was read")
COPY_NS = _attribute("tracekv.time.copy_ns", "int", "ns", "Copying between host and pages")
STALL_NS = _attribute("tracekv.time.stall_ns", "int", "ns", "The forward pass waited")
TRANSFER_NS = _attribute("tracekv.time.transfer_ns", "int", "ns", "Of a store operation, moving bytes")

# Steps and metadata -----------------------------------------------------------------------------------------------------------

REQUESTS = _attribute("tracekv.requests", "int", "{request}", "Requests of the step")
NEW_REQUESTS = _attribute("tracekv.new_requests", "int", "{request}", "Of them, reported for the first time")
SCHEDULED_TOKENS = _attribute("tracekv.scheduled_tokens", "int", "{token}", "Tokens that the pass computes")
HAS_METADATA = _attribute("tracekv.metadata.present", "bool", "", "Whether build_connector_meta returned something")
HAS_ENVELOPE = _attribute("tracekv.metadata.envelope", "bool", "", "Whether the metadata came in tracekv's envelope")
METADATA_BYTES = _attribute("tracekv.metadata.bytes", "int", "By", "Size of the pickled metadata")
METADATA_DIGEST = _attribute("tracekv.metadata.digest", "str", "", "Digest of the pickled metadata")
SAVING_GIVEN = _attribute("tracekv.saving.given", "int", "{request}", "Ids of kept pages announced to get_finished")
SAVING_RETURNED = _attribute("tracekv.saving.returned", "int", "{request}", "Ids it reported as saved")
LOADING_GIVEN = _attribute(
    "tracekv.loading.given", "int", "{request}", "Ids of parked requests announced to get_finished"
)
LOADING_RETURNED = _attribute("tracekv.loading.returned", "int", "{request}", "Ids it reported as loaded")
HAS_CALLABLE = _attribute("tracekv.has_callable", "bool", "", "Whether register_forward_pass_callable gave one")
INSTRUMENT = _attribute("tracekv.instrument", "str", "", "Instrument of tracekv that was removed")
NOT_IMPLEMENTED = _attribute(
    "tracekv.not_implemented", "str[]", "", "Callbacks that the inner class inherits unchanged"
)

# Store operations -------------------------------------------------------------------------------------------------------------

STORE_ENGINE = _attribute("tracekv.store.engine", "str", "", "local, s3, memory or the URL's protocol")
STORE_OUTCOME = _attribute("tracekv.store.outcome", "str", "", "How the operation ended; a miss is no error")
STORE_ATTEMPTS = _attribute("tracekv.store.attempts", "int", "{attempt}", "Attempts, the last one included")
STORE_BREAKER = _attribute("tracekv.store.breaker", "str", "", "Circuit breaker: closed, open or half_open")
REASON = _attribute("tracekv.reason", "str", "", "Why blocks were dropped")
FATE = _attribute("tracekv.prefetch.fate", "str", "", "What became of prefetched blocks: useful, late or wasted")
LEAD_NS = _attribute("tracekv.prefetch.lead_ns", "int", "ns", "From staged to first use")
