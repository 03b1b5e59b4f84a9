"""An offer of what another engine has just committed tells how long ago that was, whatever way it is made."""

from __future__ import annotations

import pytest

from tests.fsspec.engine import B, prompt
from tracekv.journal.records import Lookup

TOKENS = prompt(3)


@pytest.mark.parametrize("offer", ["staged", "async"])
def test_the_first_offer_of_another_engines_commit_is_news_and_the_next_is_not(engines, configure, records, offer):
    writer = engines(windows=(None, 8))
    configure(offer=offer)
    reader = engines(windows=(None, 8))
    writer.finish(writer.prefill(1, TOKENS))
    assert writer.scheduler.flush(20)
    reader.scheduler._engine.stager.catalog.refresh()
    offered = [reader.admit(number, TOKENS, may_park=offer == "async") for number in (1, 2)]
    assert [running.offered for running in offered] == [3 * B] * 2
    first, second = [lookup for lookup in records.of(Lookup) if lookup.offered_tokens]
    assert 0 < first.commit_to_offer_ns < 60 * 10**9
    assert second.commit_to_offer_ns == 0


@pytest.mark.parametrize("offer", ["staged", "async"])
def test_an_offer_of_what_was_stored_before_is_no_news(engines, configure, records, offer):
    writer = engines()
    writer.finish(writer.prefill(1, TOKENS))
    assert writer.scheduler.flush(20)
    configure(offer=offer)
    assert engines().admit(1, TOKENS, may_park=offer == "async").offered == 3 * B
    assert records.of(Lookup)[-1].commit_to_offer_ns == 0
