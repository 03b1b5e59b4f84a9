"""``tracekv store``: what lies in a store, whether it is whole, and how it is kept from growing."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from tracekv.settings import SettingsError, load_section
from tracekv.views.amounts import size

if TYPE_CHECKING:
    from tracekv_fsspec.inventory import Inventory, StoredCommit
    from tracekv_fsspec.removal import Plan
    from tracekv_fsspec.store import Store

store = typer.Typer(
    add_completion=False, help="Look into a store of KV blocks, verify it, and delete from it.", no_args_is_help=True
)

Url = Annotated[
    str | None, typer.Option("--store", help="An fsspec URL; TRACEKV_FSSPEC__URL otherwise.", show_default=False)
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what would be deleted, and delete nothing.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Don't ask.")]
Grace = Annotated[
    float, typer.Option(min=0, help="Seconds between saying what goes and deleting it: more than a refresh and a load.")
]
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


@store.command()
def ls(url: Url = None, as_json: AsJson = False) -> None:
    """Usage by namespace: blocks, bytes, how long ago written and used. A namespace is a model's KV with one salt and adapter."""
    with _opened(url) as (opened, console):
        rows = _usage(_surveyed(opened, console))
    if as_json:
        return _print_json({"store": opened.url, "namespaces": rows})
    if not rows:
        typer.echo(f"{opened.url} holds no KV")
        return None
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold")
    for name in ("namespace", "deployment", "commits", "blocks", "size", "oldest", "newest", "used"):
        is_name = name in ("namespace", "deployment")
        table.add_column(name, justify="left" if is_name else "right", no_wrap=True, overflow="fold")
    for row in rows:
        table.add_row(
            row["namespace"][:16] + row["namespace"][32:40],  # a part that is the tenant's, and one that isn't
            row["deployment"][:8],
            *(str(row[name]) for name in ("commits", "blocks")),
            size(row["bytes"]),
            *(_ago(row[name]) for name in ("oldest", "newest", "last_used")),
        )
    Console(highlight=False).print(table)
    return None


@store.command()
def stat(url: Url = None, as_json: AsJson = False) -> None:
    """Totals, and what lies there that no engine will ever read."""
    with _opened(url) as (opened, console):
        found = _surveyed(opened, console)
        facts = {
            "store": opened.url,
            "bytes": found.nbytes,
            "free_bytes": _free_bytes(opened),
            "blocks": sum(commit.blocks for commit in found.commits),
            "commits": len(found.commits),
            "segments": sum(len(commit.segments) for commit in found.commits),
            "broken_commits": sum(commit.fault is not None or bool(commit.missing) for commit in found.commits),
            "buried_commits": sum(commit.buried_at is not None for commit in found.commits),
            "orphans": len(found.orphans),
            "orphan_bytes": sum(entry.size for entry in found.orphans),
            "other_objects": len(found.others),
        }
    if as_json:
        return _print_json(facts)
    table = Table(show_header=False)
    for name, value in facts.items():
        shown = size(value) if name.endswith("bytes") and isinstance(value, int) else str(value)
        table.add_row(name.replace("_", " "), shown)
    Console(highlight=False).print(table)
    return None


@store.command()
def verify(url: Url = None, as_json: AsJson = False) -> None:
    """Read every byte and check it; exits with 1 where something is wrong."""
    from tracekv_fsspec.inventory import verify as verified

    with _opened(url) as (opened, console):
        found = _surveyed(opened, console)
        wrong: dict[str, str] = {}
        with _progress(console, "verifying") as progress:
            for number, commit in enumerate(found.commits, 1):
                wrong |= {path: outcome.value for path, outcome in verified(opened, commit).items()}
                progress(number, len(found.commits))
    blocks = sum(commit.blocks for commit in found.commits)
    if as_json:
        _print_json({"store": opened.url, "commits": len(found.commits), "blocks": blocks, "wrong": wrong})
    else:
        for path, outcome in sorted(wrong.items()):
            typer.echo(f"{outcome}: {path}")
        typer.echo(f"{len(found.commits)} commits with {blocks} blocks, {len(wrong)} objects wrong")
    if wrong:
        raise typer.Exit(1)


@store.command()
def gc(
    url: Url = None,
    high: Annotated[str | None, typer.Option(help="Begin when the store is larger (500G).", show_default=False)] = None,
    low: Annotated[str | None, typer.Option(help="Go on until it is as small; --high otherwise.")] = None,
    min_free: Annotated[
        str | None, typer.Option(help="Local: begin when the disk has less room (50G).", show_default=False)
    ] = None,
    target_free: Annotated[
        str | None, typer.Option(help="Local: go on until it has as much; --min-free otherwise.")
    ] = None,
    idle_days: Annotated[float | None, typer.Option(min=0, help="Delete what wasn't read for so many days.")] = None,
    grace: Grace = 15.0,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Delete what was used least recently, down to a low watermark; and leftovers of writers that died."""
    from tracekv_fsspec.removal import plan_cleaning

    limits = [None if limit is None else parsed_size(limit) for limit in (high, low, min_free, target_free)]
    with _opened(url) as (opened, console):
        found = _surveyed(opened, console)
        excess = _excess(found.nbytes, _free_bytes(opened), *limits)
        plan = plan_cleaning(
            found, excess=excess, idle_s=None if idle_days is None else idle_days * 86_400, grace_s=grace
        )
        _carry_out(opened, console, plan, grace, dry_run, as_json)


@store.command()
def rm(
    url: Url = None,
    namespace: Annotated[str | None, typer.Option(help="Digest, or its beginning, as `ls --json` tells it.")] = None,
    salt: Annotated[
        str | None,
        typer.Option(help="Every namespace of a cache salt (a tenant), in every deployment; - reads it from stdin."),
    ] = None,
    grace: Grace = 15.0,
    dry_run: DryRun = False,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Delete a namespace, or everything of a tenant."""
    from tracekv_fsspec.removal import Plan

    if (namespace is None) == (salt is None):
        raise typer.BadParameter("name what goes with either --namespace or --salt")
    if namespace is not None and len(namespace) < 8:
        raise typer.BadParameter("a namespace is named by 8 hexadecimal digits at least")
    if salt == "-":
        salt = sys.stdin.read().rstrip("\n")
    with _opened(url) as (opened, console):
        found = _surveyed(opened, console)
        plan = Plan([commit for commit in found.commits if _is_meant(commit, namespace, salt)])
        if plan.commits and not (dry_run or yes or as_json):
            typer.confirm(f"Delete {len(plan.commits)} commits, {size(plan.nbytes)}?", abort=True)
        _carry_out(opened, console, plan, grace, dry_run, as_json)


def parsed_size(text: str) -> int:
    """``500G`` in bytes; units are powers of 1,024.

    Raises:
        typer.BadParameter: It is no size.
    """
    number = text.strip().lower().removesuffix("ib").removesuffix("b")
    unit = number[-1:] if number[-1:].isalpha() else ""
    try:
        nbytes = int(float(number.removesuffix(unit)) * _UNITS[unit])
    except (KeyError, ValueError, OverflowError):
        nbytes = -1
    if nbytes < 0:
        raise typer.BadParameter(f"{text!r} is no size; write 500G, 1.5T or a number of bytes")
    return nbytes


def _excess(
    nbytes: int, free: int | None, high: int | None, low: int | None, min_free: int | None, target_free: int | None
) -> int:
    """How many bytes have to go."""
    excess = 0
    if high is not None and nbytes > high:
        excess = nbytes - min(high, high if low is None else low)
    if min_free is not None:
        if free is None:
            raise typer.BadParameter("--min-free is for stores on a local file system; use --high and --low")
        if free < min_free:
            excess = max(excess, max(min_free, target_free or 0) - free)
    return excess


def _is_meant(commit: StoredCommit, namespace: str | None, salt: str | None) -> bool:
    from tracekv_fsspec.keys import tenant_digest

    if commit.manifest is None or commit.deployment is None:
        return False
    if namespace is not None:
        digest = commit.manifest.namespace.hex()
        return digest.startswith(namespace) or (digest[:16] + digest[32:40]).startswith(namespace)
    return commit.manifest.namespace.startswith(tenant_digest(commit.deployment, salt))


def _carry_out(opened: Store, console: Console, plan: Plan, grace: float, dry_run: bool, as_json: bool) -> None:
    from tracekv_fsspec.removal import carry_out

    if not dry_run:
        with _progress(console, "deleting") as progress:
            carry_out(opened, plan, grace_s=grace, sleep=lambda s: _wait(console, s), progress=progress)
    facts = {
        "store": opened.url,
        "dry_run": dry_run,
        "bytes": plan.nbytes,
        "commits": [each.entry.path for each in plan.commits],
        "finished": [each.entry.path for each in plan.graves],
        "leftovers": [entry.path for entry in plan.leftovers],
    }
    if as_json:
        return _print_json(facts)
    verb = "would delete" if dry_run else "deleted"
    typer.echo(
        f"{verb} {len(plan.commits) + len(plan.graves)} commits and {len(plan.leftovers)} leftovers, "
        f"{size(plan.nbytes)}"
    )
    return None


def _wait(console: Console, seconds: float) -> None:
    with console.status(f"{seconds:g} s of grace for what engines have promised"):
        time.sleep(seconds)


def _usage(found: Inventory) -> list[dict[str, Any]]:
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for commit in found.commits:
        if commit.manifest is None or commit.deployment is None or commit.buried_at is not None:
            continue
        place = commit.manifest.namespace.hex(), commit.deployment.hex()
        row = rows.setdefault(
            place,
            {
                "namespace": place[0], "deployment": place[1], "tenant": place[0][:32], "commits": 0, "blocks": 0,
                "bytes": 0, "oldest": commit.entry.modified, "newest": 0.0, "last_used": 0.0,
            },
        )  # fmt: skip
        row["commits"] += 1
        row["blocks"] += commit.blocks
        row["bytes"] += commit.nbytes
        row["oldest"] = min(row["oldest"], commit.entry.modified)
        row["newest"] = max(row["newest"], commit.entry.modified)
        row["last_used"] = max(row["last_used"], commit.used_at)
    return sorted(rows.values(), key=lambda row: -row["bytes"])


@contextmanager
def _opened(url: str | None) -> Iterator[tuple[Store, Console]]:
    from tracekv_fsspec.scheduler import open_configured
    from tracekv_fsspec.settings import Settings
    from tracekv_fsspec.store import StoreError, StoreUnusable

    console = Console(stderr=True, highlight=False)
    try:
        settings = load_section("fsspec", Settings)
        opened = open_configured(settings if url is None else msgspec.structs.replace(settings, url=url))
        try:
            yield opened, console
        finally:
            opened.close()
    except (SettingsError, StoreUnusable) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from None
    except StoreError as error:
        typer.echo(f"tracekv: {error} ({error.outcome.value})", err=True)
        raise typer.Exit(2) from None


def _surveyed(opened: Store, console: Console) -> Inventory:
    from tracekv_fsspec.inventory import survey

    with _progress(console, "reading manifests") as progress:
        return survey(opened, progress)


@contextmanager
def _progress(console: Console, what: str) -> Iterator[Callable[[int, int], None]]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _free_bytes(opened: Store) -> int | None:
    if opened.engine != "local":
        return None
    import os

    from fsspec.implementations.local import LocalFileSystem

    try:
        facts = os.statvfs(LocalFileSystem._strip_protocol(opened.url))
    except OSError:
        return None
    return facts.f_bavail * facts.f_frsize


def _ago(seconds: float) -> str:
    passed = max(0.0, time.time() - seconds)
    for unit, seconds_of in (("d", 86_400), ("h", 3600), ("min", 60)):
        if passed >= seconds_of:
            return f"{passed / seconds_of:.0f} {unit}"
    return f"{passed:.0f} s"


def _print_json(facts: object) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(facts) + b"\n")
    sys.stdout.buffer.flush()
