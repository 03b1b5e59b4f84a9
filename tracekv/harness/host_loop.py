"""What the host does behind a forward: at once, or, in the overlap loop, while the next one is under way."""

from __future__ import annotations

from tracekv.harness.ending import Requests
from tracekv.harness.forward import Launched


class HostLoop:
    """Takes passes in their order, and has the requests advance, be announced and end.

    Args:
        overlap: The tokens of a pass are learnt when the next one is under way, and acted on then.
    """

    def __init__(self, requests: Requests, *, overlap: bool) -> None:
        self._requests = requests
        self._overlap = overlap
        self._previous: Launched | None = None

    @property
    def is_behind(self) -> bool:
        """A pass has run whose tokens aren't known yet."""
        return self._previous is not None

    def finish(self, launched: Launched | None) -> None:
        """A pass is over; None where none of its batch ran."""
        if self._overlap:
            self._finish_late(launched)
        elif launched is not None:
            self._finish(launched)

    def _finish(self, launched: Launched) -> None:
        requests = self._requests
        requests.advance(launched)
        requests.take_tokens(launched)
        requests.commit_context(launched.batch)
        requests.announce(launched.batch)
        requests.handle_cancelled()
        requests.respond()
        requests.commit_generation(launched.batch)

    def _finish_late(self, launched: Launched | None) -> None:
        requests, previous = self._requests, self._previous
        self._previous = launched
        if previous is not None:
            requests.take_tokens(previous)
            requests.announce(previous.batch)
        if launched is not None:
            requests.advance(launched)
            requests.commit_context(launched.batch)
        if previous is not None:
            requests.handle_cancelled()
            requests.respond()
            requests.commit_generation(previous.batch)
