"""Save a prompt's KV in a bucket and restore it in a fresh engine: ``python -m examples.kv_in_s3 s3://bucket/prefix``.

Credentials and endpoint come from the usual AWS variables. Each engine is a process of its own, so that nothing but the bucket can
carry KV from one to the other. The second one is also run under another salt: that is another tenant, and finds nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import secrets
import subprocess
import sys
from typing import Any


def serve(salt: str) -> None:
    """One engine, one prompt: what an engine process does. Prints what became of the prompt."""
    from tracekv.harness import Executor, build_model
    from tracekv.trtllm import Scheduler, Worker

    model = build_model("gemma3", num_hidden_layers=4)
    executor = Executor(model, Scheduler, Worker, mode="v2", num_blocks=64)
    request = executor.submit(random.Random(0).choices(range(2048), k=300), 8, cache_salt=salt)
    executor.run()
    executor.shutdown()  # what waits to be stored is stored before it returns
    if request.error is not None:
        raise request.error
    print(json.dumps({"served_tokens": request.honoured_tokens, "output_tokens": request.output_tokens}))


def engine(url: str, salt: str) -> dict[str, Any]:
    """Run :func:`serve` in a fresh process."""
    environ = os.environ | {
        "TRACEKV_CONNECTOR": "fsspec",
        "TRACEKV_FSSPEC__URL": url,
        "TRACEKV_FSSPEC__MODEL_ID": "example",
        "TRACEKV_FSSPEC__ARENA_BYTES": str(64 << 20),
        # The query waits for the bucket, so that a prompt's first touch in an engine is a hit. See docs/offers.md for other ways.
        "TRACEKV_FSSPEC__OFFER_WAIT_MS": "10000",
        "TRACEKV_AGENT": os.environ.get("TRACEKV_AGENT", "off"),
    }
    command = [sys.executable, "-m", "examples.kv_in_s3", "--serve", salt, url]
    done = subprocess.run(command, env=environ, stdout=subprocess.PIPE, text=True, check=True)
    told: dict[str, Any] = json.loads(done.stdout)
    return told


def main() -> None:
    """Save, restore, and ask as another tenant."""
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m examples.kv_in_s3")
    parser.add_argument("url", help="s3://bucket/prefix, or any other fsspec URL")
    parser.add_argument("--serve", metavar="SALT", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve is not None:
        serve(options.serve)
        return
    salt = secrets.token_hex(8)  # nothing of an earlier round is found
    saved = engine(options.url, salt)
    restored = engine(options.url, salt)
    other = engine(options.url, salt + "-other")
    if not saved["output_tokens"] == restored["output_tokens"] == other["output_tokens"]:
        sys.exit("the answers differ: that was not the same KV")
    print(f"first engine:  {saved['served_tokens']} tokens from {options.url}")
    print(f"second engine: {restored['served_tokens']} tokens, and the same answer")
    print(f"another salt:  {other['served_tokens']} tokens")


if __name__ == "__main__":
    main()
