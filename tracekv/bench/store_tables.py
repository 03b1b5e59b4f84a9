"""The benchmarks of the store as Markdown, with the goals beside what was measured."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tracekv.bench import page

if TYPE_CHECKING:
    from tracekv.bench.lookup import LookupCost
    from tracekv.bench.store import Row, StoreSpeed

_NAMES = {"local": "files on this machine's disk", "s3": "S3 (SeaweedFS on the loopback address)"}
#: By engine, operation, temperature and KiB of a block: at least so many times the document's way.
_SEED_GOALS = {
    ("s3", "load", None, 64): 40,
    ("s3", "load", None, 1024): 6,
    ("local", "load", "cold", 64): 15,
    ("local", "load", "cold", 1024): 2,
    ("local", "save", None, 64): 8,
}
_LIMIT_GOALS = {("s3", "load", None): 0.7, ("local", "load", "cold"): 0.85}


def store_name(engine: str) -> str:
    """What a part of the page is called."""
    return _NAMES.get(engine, engine)


def store_body(speed: StoreSpeed) -> str:
    """The part of the page."""
    headings = (
        "blocks", "operation", "tracekv, MB/s", "document's way, MB/s", "limit, MB/s", "ratio to the document's way",
        "ratio to the limit", "CPU per block, µs (the limit's)", "requests per 1,024 blocks",
    )  # fmt: skip
    rows = [_row(speed.engine, row) for row in speed.rows]
    described = page.machine("torch", "obstore", "s3fs", "fsspec", "xxhash")
    note = (
        "*tracekv*: from the query to verified blocks in host memory, or from a page to the commit. *Document's way*: one "
        "file per block, `torch.save` and `torch.load(fs.open(path))`, one by one. *Limit*: the same segments by positioned "
        "I/O (O_DIRECT where the file isn't cached) or ranged requests of 4 MiB, 8 in flight, into a buffer, and nothing else."
    )
    rounds = f"{speed.rounds} rounds of {speed.round_bytes >> 20} MiB; a goal stands behind its number."
    return f"{described}. {rounds}\n\n{page.table(headings, rows)}\n\n{note}"


def _row(engine: str, row: Row) -> tuple[str, ...]:
    kib = row.block_bytes >> 10
    seed_goal = _SEED_GOALS.get((engine, row.op, row.temperature, kib))
    limit_goal = _LIMIT_GOALS.get((engine, row.op, row.temperature))
    is_s3_load = engine == "s3" and row.op == "load"
    cpu = f"{row.cpu_us_per_block:.0f} ({row.limit_cpu_us_per_block:.0f})"
    if is_s3_load:
        ratio = row.cpu_us_per_block / row.limit_cpu_us_per_block
        cpu += f", {ratio:.2f} times as much (goal: <= 1.3{', and <= 70 µs' if kib == 64 else ''})"
    requests = f"{row.requests_per_1024_blocks:.0f}"
    if is_s3_load:
        requests += f" (goal: <= {20 if kib == 64 else 1024 * row.block_bytes // (4 << 20) + 4})"
    return (
        f"{kib} KiB" if kib < 1024 else f"{kib >> 10} MiB",
        f"{row.op}, {row.temperature}" if row.temperature else row.op,
        _number(row, "tracekv_mb_s"),
        _number(row, "seed_mb_s"),
        _number(row, "limit_mb_s"),
        _number(row, "ratio_seed") + (f" (goal: >= {seed_goal})" if seed_goal else ""),
        _number(row, "ratio_limit") + (f" (goal: >= {limit_goal})" if limit_goal else ""),
        cpu,
        requests,
    )


def _number(row: Row, name: str) -> str:
    low, high = row.spread[name]
    return f"{getattr(row, name):.3g} [{low:.3g}, {high:.3g}]"


def lookup_body(cost: LookupCost) -> str:
    """The part of the page."""

    def row(label: str, name: str, goal: str) -> tuple[str, str, str, str]:
        low, high = cost.spread[name]
        return label, f"{getattr(cost, name):.3g} ms", f"[{low:.3g}, {high:.3g}]", goal

    rows = [
        row(f"longest prefix, {cost.prefix_blocks:,} blocks", "prefix_ms", "<= 0.2 ms"),
        row(f"keys of {cost.prompt_tokens:,} tokens in blocks of {cost.tokens_per_block}", "hash_ms", ""),
        row("keys and lookup together", "hash_and_lookup_ms", "<= 6 ms"),
        (f"memory of an index of {cost.index_blocks:,} blocks", f"{cost.index_bytes / 1e6:.0f} MB", "", "<= 160 MB"),
        ("reading its manifests into it, without the store's time", f"{cost.index_read_s:.2f} s", "", ""),
    ]
    described = page.machine("xxhash", "msgspec")
    rounds = f"{cost.rounds} rounds, in each the fastest of five calls."
    return f"{described}. {rounds}\n\n{page.table(('', 'median', 'range', 'goal'), rows)}"
