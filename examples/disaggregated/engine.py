"""One engine in a process of its own: prompts come as JSON lines, answers go back as JSON lines.

Which half it is says ``TRACEKV_FSSPEC__ROLE``: a ``producer`` saves what it computes and never loads, a ``consumer`` loads and never
saves. Neither knows of the other; the store is all that they share.
"""

from __future__ import annotations

import json
import sys

import torch

from tracekv.harness import Executor, build_model
from tracekv.journal.current import current
from tracekv.journal.memory import MemoryJournal
from tracekv.journal.records import Lookup
from tracekv_fsspec import Scheduler, Worker


def main() -> None:
    """Serve until the input ends."""
    torch.set_num_threads(1)
    current.journal = journal = MemoryJournal()
    executor = Executor(build_model("llama", seed=0, num_hidden_layers=2), Scheduler, Worker, mode="v2", num_blocks=128)
    _say({"ready": True})
    for line in sys.stdin:
        asked = json.loads(line)
        request = executor.submit(asked["prompt"], asked["max_new_tokens"])
        executor.run()
        if request.error is not None:
            raise request.error
        # A prompt counts as prefilled when others can find it, so what was saved is committed before the answer.
        executor.scheduler.flush(30)
        lookups = [record for record in journal.read(0)[0] if isinstance(record, Lookup)]
        _say(
            {
                "output_tokens": request.output_tokens,
                "loaded_tokens": request.honoured_tokens,
                "ttft_ms": round(1000 * (request.ttft_s or 0.0), 1),
                "commit_to_offer_ms": round(lookups[-1].commit_to_offer_ns / 1e6, 1),
            }
        )
    executor.shutdown()


def _say(answer: dict[str, object]) -> None:
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
