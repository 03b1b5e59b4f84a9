"""One of the demo's processes: builds the model, runs the prompt through the reference executor, tells what happened.

Reads one JSON job from standard input; writes one JSON object a line to standard output: progress, then the result or an error.
"""

from __future__ import annotations

import json
import os
import random
import sys
import traceback
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from tracekv.journal.vocabulary import Direction

if TYPE_CHECKING:  # imported where it is used: the model comes first, and its settings are the environment's
    import torch

    from tracekv.harness.executor import Executor
    from tracekv.harness.requests import Request
    from tracekv.journal.current import Journal
    from tracekv.journal.reader import JournalReader
    from tracekv.journal.records import Record
    from tracekv.views.summary import Summary, SummaryView

TOKENS_PER_BLOCK = 32
CHUNK_TOKENS = 512
NEW_TOKENS = 16


def _say(**message: Any) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


class _Job:
    """A phase of the demo: the same model, prompt and passes in both processes."""

    def __init__(self, job: dict[str, Any]) -> None:
        from tracekv.harness.models import build_model, load_model, model_identity

        _say(progress="building the model")
        self.model = load_model(job["model"]) if job["model"] else build_model(job["preset"])
        self.mode: Literal["v1", "v2"] = "v2" if self._windows() else "v1"
        vocabulary = self.model.config.get_text_config().vocab_size
        generator = random.Random(job["prompt_seed"])  # noqa: S311  # a prompt, not a secret
        self.prompt = generator.choices(range(vocabulary), k=job["prompt_tokens"])
        self.salt = job["salt"]
        self.seed = job["prompt_seed"]
        self.seconds = job.get("seconds", 0.0)
        os.environ["TRACEKV_FSSPEC__MODEL_ID"] = model_identity(self.model)

    def _windows(self) -> bool:
        config = self.model.config.get_text_config()
        return "sliding_attention" in (getattr(config, "layer_types", None) or ())

    def executor(self, *connector: type) -> Executor:
        from tracekv.harness.executor import Executor

        blocks = 2 * -(-(len(self.prompt) + NEW_TOKENS) // TOKENS_PER_BLOCK) + 4
        return Executor(
            self.model,
            *connector,
            mode=self.mode,
            tokens_per_block=TOKENS_PER_BLOCK,
            num_blocks=blocks,
            chunk_tokens=CHUNK_TOKENS,
        )

    def run(self, executor: Executor) -> Request:
        request = executor.submit(self.prompt, NEW_TOKENS, cache_salt=self.salt)
        executor.run()
        if request.error is not None:
            raise request.error
        return request

    def connected(self, progress: str) -> tuple[Any, dict[str, Any]]:
        """Run the prompt with the traced connector; the request, and what its journal and executor tell."""
        from tracekv import capture
        from tracekv.capture import implemented_callbacks
        from tracekv.journal.current import current
        from tracekv.trtllm import Scheduler, Worker
        from tracekv.views.summary import SummaryView

        executor = self.executor(Scheduler, Worker)
        _say(progress=progress)
        request = self.run(executor)
        executor.shutdown()
        # Opened before it ends: from then on a process that starts may remove it.
        reader = _reader(current.journal)
        capture.shutdown(timeout_s=10)
        view = SummaryView()
        for record in _records(reader, view):
            view.feed(record)
        implemented = {callback for cls in (Scheduler, Worker) for callback in implemented_callbacks(cls)}
        return request, {
            "tokens": request.output_tokens,
            "prompt_tokens": len(self.prompt),
            "calls": dict(executor.calls),
            "implemented": sorted(f"{callback.side.value}.{callback.method}" for callback in implemented),
            **_totals(view.summary),
        }


def _reader(journal: Journal | None) -> JournalReader:
    from tracekv.journal.opening import open_journal
    from tracekv.journal.ring import RingJournal

    path = journal.path if isinstance(journal, RingJournal) else None
    if path is None:
        raise RuntimeError("tracekv: no journal was written, so there is nothing to show; see the warning above")
    return open_journal(path, patience_ns=0)


def _records(reader: JournalReader, view: SummaryView) -> Iterator[Record]:
    """Everything that this process's journal holds."""
    cursor = 0
    while True:
        records, cursor, lost = reader.read(cursor)
        view.lost(lost)
        if not records and not lost:
            return
        yield from records


def _totals(summary: Summary) -> dict[str, Any]:
    """What the records of this process add up to."""
    return {
        "offered_tokens": summary.offered_tokens,
        "loaded_tokens": summary.loaded_tokens,
        "saved_bytes": summary.saved_bytes,
        "loaded_bytes": summary.loaded_bytes,
        "misses": summary.misses,
        "drops": summary.drops,
        "lost_records": summary.lost_records,
        "layer_groups": [
            {
                "id": group.layer_group_id,
                "window": group.window_size,
                "saved_pages": group.pages(Direction.SAVE),
                "saved_bytes": group.nbytes(Direction.SAVE),
                "loaded_pages": group.pages(Direction.LOAD),
                "loaded_bytes": group.nbytes(Direction.LOAD),
            }
            for _, group in sorted(summary.layer_groups.items())
        ],
        "durations": {name: msgspec.to_builtins(callback.durations) for name, callback in summary.callbacks.items()},
    }


def _save(job: _Job) -> dict[str, Any]:
    _, told = job.connected("computing the prompt and saving its KV")
    return told


def _first_logits(request: Request) -> torch.Tensor:
    if request.first_logits is None:
        raise RuntimeError(
            f"tracekv: request {request.request_id} ended without a token, so there is nothing to compare"
        )
    return request.first_logits


def _load(job: _Job) -> dict[str, Any]:
    import torch

    request, told = job.connected("restoring the KV and computing the rest")
    _say(progress="the same prompt without a connector, cold and from device reuse")
    bare = job.executor()
    cold = job.run(bare)
    reused = job.run(bare)
    logits, again, anew = _first_logits(request), _first_logits(reused), _first_logits(cold)
    return {
        **told,
        "cold_tokens": cold.output_tokens,
        "bit_equal_to_reuse": torch.equal(logits, again),
        "reuse_logit_diff": float((logits - again).abs().max()),
        "max_logit_diff": float((logits - anew).abs().max()),
        "device_tokens": request.device_tokens,
        "honoured_tokens": request.honoured_tokens,
        "ttft_cold_s": cold.ttft_s,
        "ttft_warm_s": request.ttft_s,
    }


def _traffic(job: _Job) -> dict[str, Any]:
    from tracekv import capture
    from tracekv.cli.demo_traffic import Traffic, keep_busy
    from tracekv.trtllm import Scheduler, Worker

    executor = job.executor(Scheduler, Worker)
    vocabulary = job.model.config.get_text_config().vocab_size
    # Six of them are more than the device's pages, of which there are enough for two of the demo's prompts.
    traffic = Traffic(vocabulary, len(job.prompt) * 3 // 5, job.salt, job.seed)
    served = keep_busy(executor, traffic, job.seconds, lambda text: _say(progress=text))
    executor.shutdown()
    capture.shutdown(timeout_s=10)
    return dict(served)


def main() -> None:
    """Run the job that standard input holds."""
    job = json.loads(sys.stdin.read())
    try:
        _say(**{"save": _save, "load": _load, "traffic": _traffic}[job["phase"]](_Job(job)))
    except Exception as error:
        # An error of ours says by itself what happened and what to do; only another's needs its traceback.
        if str(error).startswith("tracekv:"):
            _say(error=str(error))
        else:
            traceback.print_exc()
            _say(error=f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
