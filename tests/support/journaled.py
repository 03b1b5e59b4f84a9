"""Records as journals on disk: what commands read."""

from __future__ import annotations

import hashlib

import msgspec

from tracekv.journal.process import describe_self
from tracekv.journal.ring import RingJournal

_LARGE = 1 << 24


def write_journals(directory, records):
    """A ring file for each source of ``(source, record)``, in the order of the records; all have ended in order."""
    journals = {}
    for source, record in records:
        if source not in journals:
            # Records may have a clock of their own, so nothing is said of when the process began.
            name = hashlib.sha256(source.encode()).digest()[:16]
            facts = msgspec.structs.replace(describe_self(), process_id=name, boot_id="", monotonic_ns=0, wall_ns=0)
            journal = RingJournal.create(directory / f"{len(journals)}.tkvring", _LARGE, facts)
            journal.claim_engine_thread()
            journals[source] = journal
        journals[source].write(record)
    for journal in journals.values():
        journal.close()
    return directory
