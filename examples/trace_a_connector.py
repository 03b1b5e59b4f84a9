"""Wrap a connector that exists, run it, and look at what it did: ``python -m examples.trace_a_connector``.

Not a line of the connector is changed. ``tracekv.trtllm`` is what an engine's YAML names; which connector it wraps, and where the
journal goes, is said in the environment. A prompt is run in one engine and again in a fresh one, which finds the files of the first.
"""

from __future__ import annotations

import argparse
import os
import random
import tempfile
from pathlib import Path

CONNECTOR = "examples.persistent_connector:PersistentKvCacheConnectorLeader,PersistentKvCacheConnectorWorker"


def main() -> None:
    """Run the prompt twice, and print the story of each request."""
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m examples.trace_a_connector")
    parser.add_argument("--connector", default=CONNECTOR)
    parser.add_argument("--journals", type=Path, help="a folder; by default a temporary one")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        journals = (options.journals or Path(folder, "journals")).absolute()
        os.environ |= {
            "KV_CACHE_FOLDER": str(Path(folder, "kv")),
            "TRACEKV_CONNECTOR": options.connector,
            "TRACEKV_JOURNAL_DIR": str(journals),
            "TRACEKV_AGENT": "off",
        }
        run_twice()
        tell(journals)


def run_twice() -> None:
    """What an engine does: construct both classes, serve, shut down."""
    from tracekv.harness import Executor, build_model
    from tracekv.trtllm import Scheduler, Worker

    model = build_model("llama", num_hidden_layers=2)
    prompt = random.Random(0).choices(range(2048), k=300)
    for _ in range(2):
        executor = Executor(model, Scheduler, Worker, mode="v1", num_blocks=64)
        request = executor.submit(prompt, 8)
        executor.run()
        executor.shutdown()
        if request.error is not None:
            raise request.error


def tell(journals: Path) -> None:
    """Read the journal back."""
    from examples.request_story import lines_of, stories
    from tracekv.journal.scan import scan
    from tracekv.views.runs import runs_of

    with scan([journals]) as found:
        for told in stories(1, runs_of(found.processes)):  # both engines call their first request so
            print("\n".join(lines_of(told)))


if __name__ == "__main__":
    main()
