"""Which stream a connector works on. No record says that yet."""

from __future__ import annotations

from tracekv.rules.model import Rule


class OtherStream(Rule):
    """Work is ordered after the stream that was handed over.

    Contract: loads on ``start_load_kv``'s stream come before the forward, saves follow ``wait_for_save``'s (contract.md 4.3,
        10 W8).
    Runtime: none; a copy on a stream of its own races the computing.
    Fix: issue copies on the stream that is handed over, or let your stream wait for an event of it. (Silent where there are no
        records of stream events: no journal of today has any.)
    """

    id = "W8"
