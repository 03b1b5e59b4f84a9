"""Prefetch: store -> arena, before a query asks.

A *hint* names a prompt that is going to be queried: by its keys, or by its tokens, which are hashed here so that the query needn't.
What of it is stored is staged behind everything that a query asked for; what isn't is looked for in the store again, soon at first,
so that another engine's commit is found before the next refresh would have come to it. *Read-ahead* keeps a chain that has just
ended, and what its next turn would need, in the arena; it comes last. Both end when their request does.

All of it is bounded: hints by number, each by half of the arena, what waits to be read by the :class:`ReadQueue`.
"""

from __future__ import annotations

import logging
import threading
import time
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import monotonic

from tracekv_fsspec.index import Shard
from tracekv_fsspec.keys import KeyChain, as_uint32, partial_keys
from tracekv_fsspec.reader import Priority, Reader
from tracekv_fsspec.tickets import Ticket

_log = logging.getLogger("tracekv.fsspec")

#: Hints that are remembered; the oldest goes first.
MOST_HINTS = 512
#: Reads ahead that wait for their turn; the oldest goes first.
MOST_AHEAD = 64
#: For so long what a hint names is looked for in the store, if it isn't there yet.
HINT_LIFE_S = 30.0
#: The first of those looks comes so soon after the one before, each further one after twice the time.
FIRST_LOOK_S = 0.05
#: Blocks that are hashed at once, so that the engine's thread gets its turn in between.
_HASHED = 256


@dataclass(eq=False)
class Hint:
    """A prompt that is going to be queried, or a chain that may go on.

    Attributes:
        tokens: Those of its blocks, until they are taken for the query.
        prompt_tokens: Length of the whole prompt.
        tails: Keys that its incomplete last block may have, by its tokens less one; none once it is staged.
        chain: Its keys, once they are hashed; taken by the query, too.
        done: So many blocks of it were known to be stored, and asked for.
        look_at: When the store is looked at again for the rest.
        started: It was looked at for the first time.
        looked: All of it was known, or a refresh that began after it is over and what that found is asked for.
    """

    namespace: bytes | None
    keys: Sequence[bytes] = ()
    tokens: array[int] | None = None
    prompt_tokens: int = 0
    request_id: int | None = None
    priority: Priority = Priority.HINTED
    tail: array[int] | None = None
    tails: Sequence[bytes] = ()
    chain: KeyChain | None = None
    done: int = 0
    tickets: list[Ticket] = field(default_factory=list)
    begun: float = field(default_factory=monotonic)
    pause_s: float = FIRST_LOOK_S
    look_at: float = 0.0
    is_cancelled: bool = False
    started: threading.Event = field(default_factory=threading.Event)
    looked: threading.Event = field(default_factory=threading.Event)


class Prefetcher:
    """Takes hints from any thread and works on them on its own. It never raises into its callers.

    Args:
        prefix: ``(shard, keys, start)`` -> ordinal of the first key that can't be had.
        most_blocks: How much of one hint is staged.
        refresh_soon: Looks for other engines' commits on a thread of its own, and then calls :meth:`refreshed`.
        longest_pause_s: Between looks; a refresh comes by itself then.

    Attributes:
        has_partial_blocks: Whether incomplete last blocks are stored and offered; the engine says so.
    """

    def __init__(
        self,
        reader: Reader,
        shards: Sequence[Shard],
        prefix: Callable[[Shard, Sequence[bytes], int], int],
        *,
        tokens_per_block: int,
        most_blocks: int,
        refresh_soon: Callable[[], None],
        longest_pause_s: float,
    ) -> None:
        self._reader = reader
        self._shards = shards
        self._prefix = prefix
        self.tokens_per_block = tokens_per_block
        self.has_partial_blocks = False
        self._most_blocks = max(1, most_blocks)
        self._refresh_soon = refresh_soon
        self._longest_pause_s = longest_pause_s
        self._changed = threading.Condition()
        self._todo: OrderedDict[int, Hint] = OrderedDict()
        self._ahead: OrderedDict[int, Hint] = OrderedDict()
        self._open: dict[int, Hint] = {}
        self._of_request: OrderedDict[int, Hint] = OrderedDict()
        self._asked: OrderedDict[int, list[Ticket]] = OrderedDict()
        self._refreshed_at: float | None = None
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="tracekv-prefetch", daemon=True)
        self._thread.start()

    def hint_prompt(
        self,
        request_id: int,
        tokens: array[int],
        prompt_tokens: int,
        namespace: bytes,
        tail: array[int] | None = None,
    ) -> None:
        """A request was enqueued.

        Args:
            tokens: Those of the blocks that its query will look up; owned from here on.
            prompt_tokens: Length of the whole prompt.
            tail: Those behind its last complete block, where incomplete blocks are stored.
        """
        self._add(Hint(namespace, (), tokens, prompt_tokens, request_id, tail=tail))

    def hint(self, keys: Sequence[bytes], tails: Sequence[bytes] = ()) -> Hint:
        """Stage what is stored of a chain; of a longer one than the arena's half, the beginning."""
        hint = Hint(None, keys, tails=tails)
        self._add(hint)
        return hint

    def take_chain(
        self, request_id: int, namespace: bytes, tokens: Sequence[int], blocks: int
    ) -> tuple[KeyChain, array[int]] | None:
        """The chain of a hinted prompt and the tokens that were hashed for it, if it is surely this prompt's and ready.

        Its length, its last block and the first token of each are compared here, all of it when the request is reported first.
        """
        hint = self._of_request.get(request_id)
        if hint is None or hint.chain is None or hint.tokens is None:
            return None
        chain, hinted = hint.chain, hint.tokens
        size = self.tokens_per_block
        if hint.namespace != namespace or hint.prompt_tokens != len(tokens) or len(chain.keys) != blocks:
            return None
        known = blocks * size
        if as_uint32(tokens[:known:size]) != hinted[::size]:
            return None
        if as_uint32(tokens[known - size : known]) != hinted[-size:]:
            return None
        hint.chain = hint.tokens = None
        return chain, hinted

    def asked(self, ticket: Ticket) -> None:
        """A query was answered while blocks that it asked for are on their way; they are wanted until its request ends."""
        if ticket.request_id is None or not ticket.outstanding:
            return
        with self._changed:
            self._asked.setdefault(ticket.request_id, []).append(ticket)
            while len(self._asked) > MOST_HINTS:
                self._asked.popitem(last=False)

    def ended(self, request_id: int, keys: Sequence[bytes], *, read_ahead: bool) -> None:
        """A request is over. Its chain is kept and completed in the arena, for its next turn, where ``read_ahead``."""
        self.forget(request_id)
        if read_ahead and keys:
            hint = Hint(None, keys, priority=Priority.AHEAD)
            with self._changed:
                self._ahead[id(hint)] = hint
                while len(self._ahead) > MOST_AHEAD:
                    self._ahead.popitem(last=False)
                self._changed.notify()

    def forget(self, request_id: int) -> None:
        """Nothing is read any more that only this request wanted."""
        with self._changed:
            hint = self._of_request.pop(request_id, None)
            tickets = self._asked.pop(request_id, [])
            if hint is not None:
                hint.is_cancelled = True
                tickets += hint.tickets
                self._todo.pop(id(hint), None)
                self._open.pop(id(hint), None)
        for ticket in tickets:
            self._reader.cancel(ticket)

    def wait(self, hint: Hint, seconds: float, deadline: float) -> None:
        """Wait until a hint was looked at, at most ``seconds``; then, until ``deadline``, for what is stored of it to be staged."""
        if hint.started.wait(seconds):
            hint.looked.wait(max(0.0, deadline - monotonic()))
            for ticket in list(hint.tickets):
                self._reader.wait_done(ticket, max(0.0, deadline - monotonic()))

    def refreshed(self, began: float) -> None:
        """The index may hold more by now: a refresh is over that began then."""
        if self._open:
            with self._changed:
                self._refreshed_at = began
                self._changed.notify()

    def close(self, seconds: float) -> None:
        """Stop."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join(seconds)

    def _add(self, hint: Hint) -> None:
        with self._changed:
            self._todo[id(hint)] = hint
            if hint.request_id is not None:
                self._of_request[hint.request_id] = hint
            while len(self._of_request) > MOST_HINTS:
                self._drop(self._of_request.popitem(last=False)[1])
            while len(self._todo) > MOST_HINTS:
                self._drop(self._todo.popitem(last=False)[1])
            self._changed.notify()

    def _drop(self, hint: Hint) -> None:
        hint.is_cancelled = True
        hint.started.set()
        hint.looked.set()
        self._todo.pop(id(hint), None)
        self._open.pop(id(hint), None)

    def _run(self) -> None:
        while True:
            with self._changed:
                while not (self._todo or self._ahead or self._refreshed_at is not None or self._is_closed):
                    due = min((hint.look_at for hint in self._open.values()), default=None)
                    if due is not None and due <= monotonic():
                        break
                    self._changed.wait(None if due is None else max(0.001, due - monotonic()))
                if self._is_closed:
                    return
                hint = next(iter(self._todo.values()), None) or next(iter(self._ahead.values()), None)
                refreshed_at = None
                if hint is not None:
                    self._todo.pop(id(hint), None)
                    self._ahead.pop(id(hint), None)
                else:
                    refreshed_at, self._refreshed_at = self._refreshed_at, None
            try:
                if hint is not None:
                    self._begin(hint)
                elif refreshed_at is not None:
                    for each in list(self._open.values()):
                        self._stage(each)
                        if each.begun < refreshed_at:
                            each.looked.set()
                else:
                    self._look_again()
            except Exception as error:  # its class only: a text could tell a token
                _log.warning(
                    "tracekv: a prefetch failed (%s); its blocks are read when they are asked for", type(error).__name__
                )

    def _begin(self, hint: Hint) -> None:
        try:
            if hint.tokens is not None and hint.namespace is not None:
                self._hash(hint, hint.tokens, hint.namespace)
            self._stage(hint)
        finally:
            hint.started.set()

    def _hash(self, hint: Hint, tokens: array[int], namespace: bytes) -> None:
        chain = KeyChain(namespace, self.tokens_per_block)
        step = _HASHED * self.tokens_per_block
        for at in range(0, len(tokens), step):
            if hint.is_cancelled:
                return
            chain.extend(tokens[at : at + step])
            time.sleep(0)  # the engine's thread may have waited for the interpreter
        hint.keys = list(chain.keys)
        if hint.tail:
            hint.tails = partial_keys(chain.link_before(len(chain.keys)), hint.tail)
            hint.tail = None
        hint.chain = chain

    def _stage(self, hint: Hint) -> None:
        """Ask for what can be had by now."""
        keys = hint.keys[: self._most_blocks]
        end = min((self._prefix(shard, keys, hint.done) for shard in self._shards), default=0)
        if end > hint.done:
            ticket = self._reader.stage(
                keys[hint.done : end], hint.done, request_id=hint.request_id, priority=hint.priority
            )
            self._reader.leave(ticket)
            hint.tickets.append(ticket)
            hint.done = end
        if end == len(hint.keys):
            self._stage_tail(hint)
        is_open = end < len(keys) and hint.priority is Priority.HINTED and monotonic() - hint.begun < HINT_LIFE_S
        with self._changed:
            is_cancelled = hint.is_cancelled
            if is_cancelled or not is_open:
                self._open.pop(id(hint), None)
                hint.looked.set()
            else:
                self._leave_open(hint)
        for ticket in hint.tickets if is_cancelled else ():
            self._reader.cancel(ticket)

    def _stage_tail(self, hint: Hint) -> None:
        """Ask for the longest incomplete last block that can be had; it isn't looked for again."""
        tails, hint.tails = hint.tails, ()
        for key in reversed(tails):
            if all(self._prefix(shard, (key,), 0) for shard in self._shards):
                ticket = self._reader.stage((key,), len(hint.keys), request_id=hint.request_id, priority=hint.priority)
                self._reader.leave(ticket)
                hint.tickets.append(ticket)
                return

    def _leave_open(self, hint: Hint) -> None:
        """Look for the rest of it later."""
        if id(hint) not in self._open:
            hint.look_at = monotonic()
        self._open[id(hint)] = hint
        while len(self._open) > MOST_HINTS:
            del self._open[next(iter(self._open))]

    def _look_again(self) -> None:
        now = monotonic()
        is_due = False
        with self._changed:
            for hint in list(self._open.values()):
                if now - hint.begun >= HINT_LIFE_S or hint.pause_s > self._longest_pause_s:
                    # The store's own refresh is as quick from here on.
                    if now - hint.begun >= HINT_LIFE_S:
                        self._open.pop(id(hint), None)
                    else:
                        hint.look_at = hint.begun + HINT_LIFE_S
                elif hint.look_at <= now:
                    is_due = True
                    hint.look_at = now + hint.pause_s
                    hint.pause_s *= 2
        if is_due:
            self._refresh_soon()
