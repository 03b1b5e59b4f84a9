"""``python -m examples.disaggregated [--store URL]``: a router in front of a prefill engine and a decode engine.

For each prompt it has the prefill engine compute it, hints it to the decode engine over that engine's socket, and then asks the decode
engine to go on. Without the hint (``--no-hint``) the decode engine learns of the new blocks with its next refresh only.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tracekv_fsspec.hint_socket import HintRequest, send_hint, sockets

WAIT_MS = 20_000


class Engine:
    """An engine's process.

    Args:
        role: ``producer`` or ``consumer``.
        folder: Where its hint socket lies.
    """

    def __init__(self, role: str, store: str, folder: Path) -> None:
        self.folder = folder
        environ = {
            "TRACEKV_FSSPEC__ROLE": role,
            "TRACEKV_FSSPEC__URL": store,
            "TRACEKV_FSSPEC__MODEL_ID": "example",
            "TRACEKV_FSSPEC__ARENA_BYTES": str(64 << 20),
            "TRACEKV_JOURNAL_DIR": str(folder),
        }
        self._process = subprocess.Popen(
            [sys.executable, "-m", "examples.disaggregated.engine"],
            env={**os.environ, **environ},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def answer(self) -> dict[str, Any]:
        """Its next line."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the engine ended with {self._process.wait()}; its error is above")
        told: dict[str, Any] = json.loads(line)
        return told

    def ask(self, prompt: Sequence[int], max_new_tokens: int) -> dict[str, Any]:
        """Run a prompt."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"prompt": list(prompt), "max_new_tokens": max_new_tokens}) + "\n")
        self._process.stdin.flush()
        return self.answer()

    def hint(self, prompt: Sequence[int]) -> int:
        """Say that a prompt is coming; how many of its blocks are staged by now."""
        (path,) = sockets(self.folder)
        return send_hint(path, HintRequest(tokens=list(prompt), wait_ms=WAIT_MS)).staged

    def stop(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(30)
        finally:
            self._process.kill()


def main() -> None:
    """Run some prompts through both engines and print what the decode engine had to say."""
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m examples.disaggregated")
    parser.add_argument("--store", help="an fsspec URL; by default a temporary folder")
    parser.add_argument("--prompts", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=1000, help="of each prompt")
    parser.add_argument("--no-hint", action="store_true", help="don't tell the decode engine what comes")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        store = options.store or Path(folder, "kv").as_uri()
        prefill, decode = (Engine(role, store, Path(folder, role)) for role in ("producer", "consumer"))
        try:
            for engine in (prefill, decode):
                engine.answer()
            for number in range(options.prompts):
                prompt = random.Random(number).choices(range(2048), k=options.tokens)
                first = prefill.ask(prompt, 1)
                staged = 0 if options.no_hint else decode.hint(prompt)
                answer = decode.ask(prompt, 8)
                if answer["output_tokens"][:1] != first["output_tokens"]:
                    raise RuntimeError("the engines disagree on the first token")
                print(json.dumps({"prompt": number, "staged_blocks": staged, **answer}), flush=True)
        finally:
            prefill.stop()
            decode.stop()


if __name__ == "__main__":
    main()
