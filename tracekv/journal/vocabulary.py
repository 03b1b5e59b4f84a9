"""The closed sets of words that records use. A view may translate them; none invents one."""

from __future__ import annotations

from enum import Enum, IntEnum


class Word(str, Enum):
    """A word of a closed set: equal to its text, and hashed as it (an enumeration's own hash is computed in Python each time)."""

    __hash__ = str.__hash__


class Side(Word):
    """Which half of a connector."""

    SCHEDULER = "scheduler"
    WORKER = "worker"


class Callback(IntEnum):
    """Every callback of the contract; the number is what a record carries (contract.md sections 1.1 and 1.2)."""

    __hash__ = int.__hash__

    SCHEDULER_INIT = 1
    GET_NUM_NEW_MATCHED_TOKENS = 2
    UPDATE_STATE_AFTER_ALLOC = 3
    UPDATE_STATE_AFTER_ALLOC_BY_LAYER_GROUP = 4
    BUILD_CONNECTOR_META = 5
    REQUEST_FINISHED = 6
    REQUEST_FINISHED_BY_LAYER_GROUP = 7
    WAIT_FOR_INITIALIZATION = 8
    CANCEL_LOAD = 9
    REQUEST_RESET = 10
    SCHEDULER_SHUTDOWN = 11
    WORKER_INIT = 32
    REGISTER_FORWARD_PASS_CALLABLE = 33
    FORWARD_PASS_CALLABLE = 34
    REGISTER_KV_CACHES = 35
    REGISTER_KV_CACHE_LAYOUT = 36
    BIND_CONNECTOR_META = 37
    START_LOAD_KV = 38
    WAIT_FOR_LAYER_LOAD = 39
    SAVE_KV_LAYER = 40
    WAIT_FOR_SAVE = 41
    GET_FINISHED = 42
    WORKER_SHUTDOWN = 43

    @property
    def side(self) -> Side:
        """Which half of the connector has it."""
        return Side.SCHEDULER if self < 32 else Side.WORKER

    @property
    def method(self) -> str:
        """The method's name in the contract."""
        if self in (Callback.SCHEDULER_INIT, Callback.WORKER_INIT):
            return "__init__"
        if self in (Callback.SCHEDULER_SHUTDOWN, Callback.WORKER_SHUTDOWN):
            return "shutdown"
        return self.name.lower()


class Direction(Word):
    """Which way KV moves, seen from the device."""

    LOAD = "load"
    SAVE = "save"


class Source(Word):
    """Where a number of bytes comes from, best first (DESIGN.md, capture)."""

    REPORTED = "reported"
    OBSERVED = "observed"
    PLANNED = "planned"
    ELIGIBLE = "eligible"


class WatchGap(Word):
    """Why the watch (``TRACEKV_WATCH``) may not have seen every byte."""

    RAW_ADDRESS = "raw_address"
    STORAGE = "storage"
    ARRAY = "array"
    DLPACK = "dlpack"
    SHARED = "shared"
    OTHER_THREAD = "other_thread"
    UNKNOWN_EXTENT = "unknown_extent"
    FAULT = "fault"


class Tier(Word):
    """Where KV came from or went to."""

    HOST = "host"
    DISK = "disk"
    OBJECT = "object"
    REMOTE = "remote"


class MissReason(Word):
    """Why a lookup offered less than the prompt allows. A miss is not an error."""

    NOT_READY = "not_ready"
    PROMPT_TOO_SHORT = "prompt_too_short"
    ON_DEVICE = "on_device"
    UNALIGNED = "unaligned"
    NOT_STORED = "not_stored"
    LAYER_GROUP_MISSING = "layer_group_missing"
    RANK_MISSING = "rank_missing"
    NOT_STAGED = "not_staged"
    ARENA_FULL = "arena_full"
    CORRUPT = "corrupt"
    STORE_DOWN = "store_down"
    BYPASS_LORA = "bypass_lora"
    BYPASS_MULTIMODAL = "bypass_multimodal"
    BYPASS_TOKENS = "bypass_tokens"
    ROLE = "role"
    ERROR = "error"


class DropReason(Word):
    """Why blocks were not saved."""

    QUEUE_FULL = "queue_full"
    QUEUE_SLOW = "queue_slow"
    ARENA_FULL = "arena_full"
    NO_SPACE = "no_space"
    STORE_DOWN = "store_down"
    STORE_REFUSED = "store_refused"
    CLOSED = "closed"
    ERROR = "error"


class Operation(Word):
    """What was asked of a store."""

    PUT = "put"
    READ = "read"
    LIST = "list"
    HEAD = "head"
    DELETE = "delete"


class Outcome(Word):
    """How a store operation ended; attempts are counted apart."""

    OK = "ok"
    EXISTS = "exists"
    MISSING = "missing"
    TRUNCATED = "truncated"
    ALTERED = "altered"
    FOREIGN = "foreign"
    VERSION = "version"
    DENIED = "denied"
    NO_SPACE = "no_space"
    TIMEOUT = "timeout"
    UNAVAILABLE = "unavailable"
    ERROR = "error"


class PrefetchFate(Word):
    """What became of a prefetched block."""

    USEFUL = "useful"
    LATE = "late"
    WASTED = "wasted"
