"""When a request's pages are full: a pass then looks at the few requests that may have outgrown theirs, not at all that run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from tracekv.journal.records import BuildCall

if TYPE_CHECKING:
    from tracekv.rules.state import Request

#: Passes ahead that are kept; what has more room than that is looked at meanwhile.
_MOST_AHEAD = 4096


class Room:
    """In which pass requests may reach past what their reported pages hold (``Request.held``).

    A request that generates moves on by one token a pass, so the pass in which its pages are full is known beforehand. What moves
    in another way (prompts, drafts, what isn't in every pass) is looked at whenever it does. Passes come one after another.
    """

    def __init__(self) -> None:
        #: ``pass -> requests that are due``; an entry counts if the request's ``full_at`` says the same.
        self._due: defaultdict[int, list[Request]] = defaultdict(list)
        #: Due in a pass that they were not in: looked at when they are back.
        self._away: dict[int, Request] = {}
        self._is_followed = True

    def forget(self, request_id: int) -> None:
        """The request with this id is no longer there."""
        self._away.pop(request_id, None)

    def fills(self, request: Request, passes: int, left: int) -> None:
        """After the pass with the number ``passes`` a request's pages have room for ``left`` tokens; below 0: they lack some."""
        ahead = 0 if left < 0 else left + 1 if left < _MOST_AHEAD else _MOST_AHEAD
        when = request.full_at = passes + ahead
        self._due[when].append(request)

    def due(
        self, record: BuildCall, passes: int, requests: Mapping[int, Request], prompts: Mapping[int, int]
    ) -> Iterable[int]:
        """Indices of the requests that have to be looked at in a pass; what :meth:`fills` was told in this pass counts.

        Args:
            record: The pass.
            passes: Its number.
            requests: By id.
            prompts: By index, the requests that are at their prompts.
        """
        ids, scheduled = record.request_ids, record.scheduled_tokens
        drafts = len(ids) - scheduled.count(1)
        for at in prompts:
            drafts -= scheduled[at] != 1
        due = self._due.pop(passes, None)
        if drafts:
            # Drafts: nobody knows how far the next pass begins, so each request is looked at in each pass.
            self._is_followed = False
            return range(len(ids))
        if not self._is_followed:
            self._is_followed = True
            here = {*ids}
            self._away = {each: request for each, request in requests.items() if each not in here}
            return range(len(ids))
        looked_at = [*prompts]
        for request in due or ():
            if request.full_at == passes and request.held is not None:
                try:
                    looked_at.append(ids.index(request.request_id))
                except ValueError:
                    self._away[request.request_id] = request
        if self._away:
            for request_id in self._away.keys() & ids:
                del self._away[request_id]
                looked_at.append(ids.index(request_id))
        return looked_at if len(looked_at) == len(prompts) else {*looked_at}
