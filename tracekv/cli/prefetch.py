"""``tracekv prefetch``: tell a running engine which prompt it is going to be asked, so that its KV is in memory by then."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from tracekv.agent.paths import journal_directory


def prefetch(
    source: Annotated[
        Path | None,
        typer.Argument(
            metavar="FILE",
            help="A prompt: token ids, a JSON list; by default from stdin.",
            dir_okay=False,
            show_default=False,
        ),
    ] = None,
    keys: Annotated[bool, typer.Option("--keys", help="The list holds keys of blocks, in hexadecimal digits.")] = False,
    salt: Annotated[str | None, typer.Option(help="The request's cache salt.", show_default=False)] = None,
    wait: Annotated[float, typer.Option(min=0, max=600, help="Seconds to wait for what is stored to be staged.")] = 0.0,
    to: Annotated[
        Path | None,
        typer.Option("--socket", help="An engine's socket; by default every engine's in TRACEKV_JOURNAL_DIR."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Stage a prompt's stored KV in a running engine, before the prompt comes. Exits with 1 where no engine took the hint."""
    from tracekv_fsspec.hint_socket import HintAnswer, HintRequest, send_hint, sockets

    request = HintRequest(cache_salt=salt, wait_ms=int(wait * 1000))
    listed = _listed(source)
    with _explained():
        if keys:
            request.keys = msgspec.convert([bytes.fromhex(each) for each in listed], type=list[bytes])
        else:
            request.tokens = msgspec.convert(listed, type=list[int])
        msgspec.convert(msgspec.to_builtins(request, builtin_types=(bytes,)), type=HintRequest)
    engines = [to] if to is not None else sockets(journal_directory())
    answers: dict[str, HintAnswer] = {}
    for engine in engines:
        try:
            answers[str(engine)] = send_hint(engine, request)
        except (OSError, ValueError) as error:
            answers[str(engine)] = HintAnswer(error=getattr(error, "strerror", None) or str(error))
    if as_json:
        sys.stdout.buffer.write(msgspec.json.encode({"engines": answers}) + b"\n")
        sys.stdout.buffer.flush()
    else:
        for path, answer in answers.items():
            shown = answer.error or f"{answer.staged} blocks staged, {answer.queued} queued, {answer.unknown} unknown"
            typer.echo(f"{Path(path).name}: {shown}")
    if not engines:
        typer.echo(f"tracekv: no engine takes hints in {journal_directory()}; name its socket with --socket", err=True)
    if all(answer.error for answer in answers.values()):
        raise typer.Exit(1)


def _listed(source: Path | None) -> list[Any]:
    with _explained():
        text = sys.stdin.buffer.read() if source is None else source.read_bytes()
        return msgspec.json.decode(text, type=list[Any])


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    """What is wrong with the input, without telling any of it."""
    try:
        yield
    except OSError as error:
        typer.echo(f"tracekv: {error.filename}: {error.strerror}", err=True)
        raise typer.Exit(2) from None
    except (msgspec.MsgspecError, ValueError, TypeError):
        typer.echo(
            "tracekv: this is no list of token ids (integers below 2^32), or with --keys of keys (32 hexadecimal digits each)",
            err=True,
        )
        raise typer.Exit(2) from None
