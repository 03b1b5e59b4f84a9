"""Send traces over OTLP, and say what to look for in Jaeger: ``python -m examples.traces_in_jaeger``.

The endpoint is OpenTelemetry's own variable, ``OTEL_EXPORTER_OTLP_ENDPOINT``; any OTLP collector, Jaeger or Tempo will do. A prompt is
saved and, by a fresh engine, restored; for each of the two requests its trace id and its address in Jaeger are printed.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
from pathlib import Path

LOOK_FOR = """\
Search for the service {service}, operation "request". In a trace:
  tracekv.offered_tokens, tracekv.honoured_tokens   on the root: what the connector had, and what the engine took of it
  tracekv.miss_reason                               on the root, where less was offered than the prompt allows
  load, save                                        spans with layer group, pages, bytes and tier
  store.read, store.put                             what the store was asked for meanwhile
Operation "step" is a pass: its children are the callbacks as they ran, and its links lead to the requests that were in it."""


def main() -> None:
    """Run the two engines with an agent in this process, and print where their traces are."""
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m examples.traces_in_jaeger")
    parser.add_argument("--endpoint", default=os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT", "http://localhost:4318"))
    parser.add_argument("--jaeger", default="http://localhost:16686", help="where its UI is")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        journals = Path(folder, "journals")
        os.environ |= {
            "OTEL_EXPORTER_OTLP_ENDPOINT": options.endpoint,
            "OTEL_SERVICE_NAME": os.environ.get("OTEL_SERVICE_NAME", "tracekv-example"),
            "TRACEKV_CONNECTOR": "fsspec",
            "TRACEKV_FSSPEC__URL": Path(folder, "kv").as_uri(),
            "TRACEKV_FSSPEC__MODEL_ID": "example",
            "TRACEKV_FSSPEC__ARENA_BYTES": str(64 << 20),
            "TRACEKV_FSSPEC__OFFER_WAIT_MS": "10000",
            "TRACEKV_JOURNAL_DIR": str(journals),
            "TRACEKV_AGENT": "thread",
            "TRACEKV_STEP_SAMPLE": "1",
        }
        run_twice()
        print_traces(journals, options.jaeger)


def run_twice() -> None:
    """The same prompt in two engines; the second finds it in the store."""
    import tracekv
    from tracekv.harness import Executor, build_model
    from tracekv.trtllm import Scheduler, Worker

    model = build_model("gemma3", num_hidden_layers=4)
    prompt = random.Random(0).choices(range(2048), k=300)
    for _ in range(2):
        executor = Executor(model, Scheduler, Worker, mode="v2", num_blocks=64)
        request = executor.submit(prompt, 8)
        executor.run()
        executor.shutdown()
        if request.error is not None:
            raise request.error
    if not tracekv.flush(30):
        sys.exit("not everything could be exported: is the endpoint there? tracekv doctor looks")


def print_traces(journals: Path, jaeger: str) -> None:
    """Where each request's trace is: its id follows from run and request, so that the journal tells it too."""
    from examples.request_story import stories
    from tracekv.journal.scan import scan
    from tracekv.views.runs import runs_of
    from tracekv.views.verdict import verdict

    with scan([journals]) as found:
        for told in stories(1, runs_of(found.processes)):
            print(f"{verdict(told)}\n  {jaeger}/trace/{told.trace_id}")
    print(LOOK_FOR.format(service=os.environ["OTEL_SERVICE_NAME"]))


if __name__ == "__main__":
    main()
