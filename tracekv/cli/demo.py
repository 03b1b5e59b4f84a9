"""``tracekv demo``: save a prompt's KV in one process, restore it in a fresh one, and prove that it is the same KV.

With ``--for`` an engine is kept busy after that, which is what the dashboards are looked at with.
"""

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
#: Every call is counted in the trace, so a sampler of the user's shell is left out; the endpoint is the traffic's, which stays.
_NOT_FOR_A_ROUND = ("OTEL_TRACES_SAMPLER", "TRACEKV_METRICS_PORT")


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
    seconds: Annotated[
        float,
        typer.Option(
            "--for",
            help="Keep an engine busy for so many seconds after that, with hits and misses; "
            "its metrics are on TRACEKV_METRICS_PORT.",
            min=0,
        ),
    ] = 0.0,
    prompt_tokens: Annotated[int, typer.Option(help="Length of the prompt.", min=1024)] = 1100,
    trace_file: Annotated[Path | None, typer.Option(help="Where the spans go (OTLP JSON lines).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Save a prompt's KV in one process, restore it in a fresh one, and show every callback on the way.

    Exits with 1 if the restored run differs from a run without a connector.
    """
    console = Console(stderr=as_json, highlight=False)
    store = store or default_store()
    path = (
        trace_file or _cache_folder() / "traces" / f"demo-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}.jsonl"
    )
    job = _new_job(preset, model, prompt_tokens)
    outcome = _run_round(console, job, store, path)
    if not as_json:
        print_round(console, outcome)
    told = outcome.as_json()
    if seconds and not outcome.differences:
        served = told["traffic"] = _run_traffic(console, job | {"seconds": seconds}, store, trace_file)
        console.print(
            f"served {served['requests']} requests in {seconds:g} s, {served['hits']} of them with a hit: of "
            f"{served['prompt_tokens']} prompt tokens {served['device_tokens']} were on the device and "
            f"{served['honoured_tokens']} came from the store"
        )
    if as_json:
        sys.stdout.write(json.dumps(told) + "\n")
        sys.stdout.flush()
    if outcome.differences:
        for difference in outcome.differences:
            Console(stderr=True, highlight=False).print(f"[red]tracekv demo: {difference}[/red]")
        raise typer.Exit(1)


def default_store() -> str:
    """A folder in the user's cache directory."""
    return (_cache_folder() / "store").as_uri()


def _cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tracekv" / "demo"


def _new_job(preset: Preset, model: Path | None, prompt_tokens: int) -> dict[str, Any]:
    return {
        "preset": preset.value,
        "model": str(model) if model else None,
        "prompt_tokens": prompt_tokens,
        "prompt_seed": secrets.randbits(48),
        # A salt of its own for each round: nothing that an earlier one stored can be found.
        "salt": f"demo-{secrets.token_hex(8)}",
    }


def _run_round(console: Console, job: dict[str, Any], store: str, trace_file: Path) -> Round:
    try:
        trace_file.parent.mkdir(parents=True, exist_ok=True)
        with trace_file.open("ab") as file:
            before = file.tell()
    except OSError as error:
        Console(stderr=True, highlight=False, soft_wrap=True).print(
            f"tracekv demo: {trace_file} can't be written: {error.strerror}. Name another file with --trace-file",
            markup=False,
        )
        raise typer.Exit(1) from None
    environ = {
        **{name: value for name, value in os.environ.items() if not name.startswith(_NOT_FOR_A_ROUND)},
        "TRACEKV_CONNECTOR": "fsspec",
        "TRACEKV_DETAIL": "full",
        "TRACEKV_STEP_SAMPLE": "1",
        "TRACEKV_AGENT": "thread",
        "TRACEKV_TRACE_FILE": str(trace_file),
        "TRACEKV_FSSPEC__URL": store,
    }
    environ.setdefault("TRACEKV_FSSPEC__OFFER_WAIT_MS", str(OFFER_WAIT_MS))
    # Where the machine is busy the budget guard would keep counters of some passes only, and here each call is looked for.
    environ.setdefault("TRACEKV_BUDGET_PCT", "100")
    with _progress(console) as say:
        saved = _run_process({**job, "phase": "save"}, environ, "process 1", say)
        loaded = _run_process({**job, "phase": "load"}, environ, "process 2", say)
        say("reading the trace back")
        return Round.judge(job, saved, loaded, (trace_file, before), store, TOLERANCE)


def _run_traffic(console: Console, job: dict[str, Any], store: str, trace_file: Path | None) -> dict[str, Any]:
    """One engine process with tracekv's usual settings; nothing of the round before is found in the store."""
    environ = {"TRACEKV_AGENT": "thread", "TRACEKV_FSSPEC__OFFER_WAIT_MS": str(OFFER_WAIT_MS)}
    environ |= {**os.environ, "TRACEKV_CONNECTOR": "fsspec", "TRACEKV_FSSPEC__URL": store}
    if trace_file is not None:
        environ["TRACEKV_TRACE_FILE"] = str(trace_file)
    job = job | {"phase": "traffic", "salt": f"demo-{secrets.token_hex(8)}"}
    with _progress(console) as say:
        return _run_process(job, environ, "traffic", say)


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
