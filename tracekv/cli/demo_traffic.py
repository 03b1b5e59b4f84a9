"""The demo's third process: an engine that is kept busy, so that metrics, dashboards and alerts have something to show.

Documents come back with another question each: more of them than the device holds, so that the connector's store has to help.
Between them come prompts that nothing knows, prompts of less than a block, and requests of a LoRA adapter, which bypass the store.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

DOCUMENTS = 6
#: Each document is asked about so often before anything is left to chance, so that there are hits however slow the machine is.
ROUNDS = 2
NEW_TOKENS = 8
#: Between two batches, so that the demo leaves the machine to others too.
PAUSE_S = 0.1
#: How often it says how far it is.
PROGRESS_S = 1.0


class Traffic:
    """Draws requests; the same seed draws the same ones.

    Args:
        vocabulary: Token ids are below it.
        document_tokens: Length of the documents that come back.
        salt: Of every request, so that nothing stored earlier is found.
    """

    def __init__(self, vocabulary: int, document_tokens: int, salt: str, seed: int) -> None:
        self._random = random.Random(seed)  # noqa: S311  # prompts, not secrets
        self._vocabulary = vocabulary
        self._salt = salt
        self._documents = [self._tokens(document_tokens) for _ in range(DOCUMENTS)]
        self._first = self._documents * ROUNDS

    def draw(self) -> tuple[str, list[int], dict[str, Any]]:
        """What kind of request it is, its prompt, and what else :meth:`Executor.submit` is told."""
        if self.is_beginning:
            return "document", self._first.pop() + self._tokens(16), {"cache_salt": self._salt}
        (kind,) = self._random.choices(("document", "fresh", "short", "adapter"), weights=(60, 20, 10, 10))
        more: dict[str, Any] = {"cache_salt": self._salt}
        if kind == "document":
            return kind, self._random.choice(self._documents) + self._tokens(16), more
        if kind == "adapter":
            more["lora_task_id"] = 1
        return kind, self._tokens(20 if kind == "short" else self._random.randrange(96, 160)), more

    @property
    def is_beginning(self) -> bool:
        """Some documents haven't been asked about for the second time."""
        return bool(self._first)

    def batch_size(self) -> int:
        """How many requests arrive together."""
        return self._random.randint(1, 3)

    def _tokens(self, count: int) -> list[int]:
        return self._random.choices(range(self._vocabulary), k=count)


def keep_busy(executor: Any, traffic: Traffic, seconds: float, say: Callable[[str], None]) -> dict[str, int]:
    """Serve requests for so many seconds, and until every document has come twice; answers what was served.

    Raises:
        Exception: That of the first request that failed.
    """
    served: Counter[str] = Counter()
    ends = time.monotonic() + seconds
    said = 0.0
    while (now := time.monotonic()) < ends or traffic.is_beginning:
        if now - said >= PROGRESS_S:
            said = now
            say(f"{served['requests']} requests, {served['hits']} with a hit; {max(0, ends - now):.0f} s to go")
        requests = []
        for _ in range(traffic.batch_size()):
            kind, prompt, more = traffic.draw()
            served[kind] += 1
            requests.append(executor.submit(prompt, NEW_TOKENS, **more))
        executor.run()
        for request in requests:
            if request.error is not None:
                raise request.error
            served["requests"] += 1
            served["hits"] += request.honoured_tokens > 0
            served["prompt_tokens"] += request.orig_prompt_len
            served["device_tokens"] += request.device_tokens
            served["honoured_tokens"] += request.honoured_tokens
        time.sleep(PAUSE_S)
    return dict(served)
