"""The requests of a replay: as a connector reads them, with pseudo tokens."""

from __future__ import annotations

from dataclasses import dataclass

from tracekv.harness.requests import Request
from tracekv.journal.records import ReplayEnd, ReplayPrompt
from tracekv.testing.replay_recording import FirstReport
from tracekv.testing.replay_tokens import PseudoTokens


@dataclass
class Live:
    """A request of the replay.

    Attributes:
        tokens: All that it will have.
        reported: How many of them were.
        start, honoured, is_async: Of the replayed offer.
        report: Its first report as recorded.
        is_early: Reported ahead of its recorded place.
    """

    request: Request
    tokens: list[int]
    reported: int = 0
    start: int = 0
    honoured: int = 0
    is_async: bool = False
    report: FirstReport | None = None
    is_early: bool = False

    def report_more(self, count: int, source: PseudoTokens) -> list[int]:
        """The next ``count`` tokens to report; the request has them from now on."""
        start, end = self.reported, self.reported + count
        lacking = end - len(self.tokens)
        if lacking > 0:
            self.tokens += source.beyond(self.request.request_id, len(self.tokens), lacking)
        self.grow_to(end)
        self.reported = end
        return self.tokens[start:end]

    def grow_to(self, end: int) -> None:
        """Let the request have its first ``end`` tokens."""
        for token in self.tokens[self.request.num_tokens : end]:
            self.request.append_token(token)


def make_request(request_id: int, prompt: ReplayPrompt | None, end: ReplayEnd | None, source: PseudoTokens) -> Live:
    """A request as it stands before its query; without tokens where its prompt was overwritten in the ring."""
    if prompt is None:
        return Live(Request(request_id, [], 1), [])
    tokens = source.sequence(prompt, end)
    request = Request(
        request_id,
        tokens[: prompt.tokens],
        1,
        cache_salt=None if prompt.salt is None else prompt.salt.hex(),
        multimodal_hashes=None
        if prompt.images is None
        else [_words(prompt.images) for _ in prompt.image_places or [0]],
        multimodal_positions=prompt.image_places or None,
        multimodal_lengths=prompt.image_lengths or None,
    )
    request.prompt_len = prompt.prompt_tokens
    return Live(request, tokens)


def _words(digest: bytes) -> list[int]:
    """A multimodal hash is eight words of 32 bits."""
    return [byte * 0x01010101 for byte in digest]
