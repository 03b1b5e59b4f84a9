"""``tracekv demo``: save a prompt's KV in one process, restore it in a fresh one, and prove that it is the same KV."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from tracekv.cli._demo_report import Round, print_round

#: The wait that the demo allows a query, so that one fresh process finds what another has stored.
OFFER_WAIT_MS = 10_000
#: Largest allowed difference of the first token's logits to the cold run, whose passes have another length.
TOLERANCE = 1e-3


class Preset(str, Enum):
    """The models that the demo can build."""

    LLAMA = "llama"
    GEMMA3 = "gemma3"


def demo(
    preset: Annotated[
        Preset, typer.Option(help="llama: one tensor and the flat callbacks; gemma3: layer groups, one with a window.")
    ] = Preset.LLAMA,
    model: Annotated[
        Path | None,
        typer.Option(help="A local Hugging Face checkpoint instead of the preset.", exists=True, file_okay=False),
    ] = None,
    store: Annotated[
        str | None, typer.Option(help="Where the KV is kept: any fsspec URL, e.g. s3://bucket/prefix.")
    ] = None,
    seconds: Annotated[float, typer.Option("--for", help="Repeat with fresh prompts for so many seconds.")] = 0.0,
    prompt_tokens: Annotated[int, typer.Option(help="Length of the prompt.", min=1024)] = 1100,
    trace_file: Annotated[Path | None, typer.Option(help="Where the spans go (OTLP JSON lines).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Save a prompt's KV in one process, restore it in a fresh one, and show every callback on the way.

    Exits with 1 if the restored run differs from a run without a connector.
    """
    console = Console(stderr=as_json, highlight=False)
    ends = time.monotonic() + seconds
    rounds = 0
    while True:
        rounds += 1
        path = (
            trace_file
            or _cache_folder() / "traces" / f"demo-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}.jsonl"
        )
        outcome = _run_round(console, preset, model, store or default_store(), prompt_tokens, path)
        if as_json:
            sys.stdout.write(json.dumps(outcome.as_json()) + "\n")
            sys.stdout.flush()
        else:
            print_round(console, outcome)
        if outcome.differences:
            for difference in outcome.differences:
                Console(stderr=True, highlight=False).print(f"[red]tracekv demo: {difference}[/red]")
            raise typer.Exit(1)
        if time.monotonic() >= ends:
            break
    if rounds > 1:
        console.print(f"{rounds} rounds, all equal to a run without a connector")


def default_store() -> str:
    """A folder in the user's cache directory."""
    return (_cache_folder() / "store").as_uri()


def _cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tracekv" / "demo"


def _run_round(
    console: Console, preset: Preset, model: Path | None, store: str, prompt_tokens: int, trace_file: Path
) -> Round:
    trace_file.parent.mkdir(parents=True, exist_ok=True)
    before = trace_file.stat().st_size if trace_file.exists() else 0
    job = {
        "preset": preset.value,
        "model": str(model) if model else None,
        "prompt_tokens": prompt_tokens,
        "prompt_seed": secrets.randbits(48),
        # A salt of its own for each round: nothing that an earlier one stored can be found.
        "salt": f"demo-{secrets.token_hex(8)}",
    }
    environ = {
        # Every call is counted in the trace, so a sampler of the user's shell is left out.
        **{name: value for name, value in os.environ.items() if not name.startswith("OTEL_TRACES_SAMPLER")},
        "TRACEKV_CONNECTOR": "fsspec",
        "TRACEKV_DETAIL": "full",
        "TRACEKV_STEP_SAMPLE": "1",
        "TRACEKV_AGENT": "thread",
        "TRACEKV_TRACE_FILE": str(trace_file),
        "TRACEKV_FSSPEC__URL": store,
    }
    environ.setdefault("TRACEKV_FSSPEC__OFFER_WAIT_MS", str(OFFER_WAIT_MS))
    with _progress(console) as say:
        saved = _run_process({**job, "phase": "save"}, environ, "process 1", say)
        loaded = _run_process({**job, "phase": "load"}, environ, "process 2", say)
        say("reading the trace back")
        return Round.judge(job, saved, loaded, (trace_file, before), store, TOLERANCE)


def _run_process(job: dict[str, Any], environ: dict[str, str], name: str, say: Any) -> dict[str, Any]:
    """Run one phase in a fresh interpreter; its standard output is one JSON object a line."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tracekv.cli.demo_process"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environ,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    with process:
        process.stdin.write(json.dumps(job))
        process.stdin.close()
        result: dict[str, Any] = {}
        for line in process.stdout:
            message = json.loads(line)
            if "progress" in message:
                say(f"{name}: {message['progress']}")
            else:
                result = message
    if "error" in result:
        Console(stderr=True, highlight=False, soft_wrap=True).print(
            f"tracekv demo: {name}: {result['error']}", markup=False
        )
        raise typer.Exit(1)
    if process.returncode or not result:
        Console(stderr=True, highlight=False).print(
            f"tracekv demo: {name} ended with exit code {process.returncode}; see above."
        )
        raise typer.Exit(1)
    return result


@contextmanager
def _progress(console: Console) -> Iterator[Any]:
    """Says what is being done: a spinner on a terminal, a line each elsewhere."""
    if not console.is_terminal:
        yield lambda text: console.print(f"  {text}", markup=False)
        return
    with console.status("starting") as status:
        yield lambda text: status.update(text)
