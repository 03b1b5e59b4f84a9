"""How long a person waits for a million records to open, and how much memory that takes: each command in a process of its own."""

from __future__ import annotations

import contextlib
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tracekv.bench.journals import write_journals
from tracekv.bench.rounds import Spread, interleave

#: A request of each run.
_REQUEST = 2050
_SAMPLE_S = 0.02
#: Runs of each command whose memory is looked at.
_MEMORY_ROUNDS = 2


@dataclass(frozen=True)
class Opening:
    """One command.

    Attributes:
        seconds: From the start of its process to its end.
        cpu_s: Of all cores, its children's included: what a busy machine changes less.
        peak_mb: Memory (PSS) of it and its children together, at the most that was seen; looked at every 20 ms, in runs of their own:
            the kernel walks all pages for each look, and the command waits for it.
    """

    name: str
    seconds: Spread
    cpu_s: Spread
    peak_mb: Spread


@dataclass(frozen=True)
class OpeningCost:
    """All of them, over the same directory."""

    records: int
    journal_mb: float
    rounds: int
    commands: tuple[Opening, ...]


def measure(rounds: int, records: int) -> OpeningCost:
    """Write journals of ``records`` records, and open them with each command, in interleaved rounds.

    Raises:
        RuntimeError: A command failed, with what it said.
    """
    with tempfile.TemporaryDirectory(prefix="tracekv-bench-") as folder:
        directory = Path(folder) / "journals"
        directory.mkdir()
        written = write_journals(directory, records)
        nbytes = sum(path.stat().st_size for path in directory.iterdir())
        commands = {
            "explain": ["explain", str(_REQUEST), str(directory)],
            "top": ["top", "--once", str(directory)],
            "report": ["report", str(directory), "-o", str(Path(folder) / "report.html"), "--no-rules"],
            "rules": ["explain", "--violations", str(directory)],
        }
        cpus: dict[str, list[float]] = {name: [] for name in commands}

        def run(name: str) -> float:
            before = _cpu_of_children()
            seconds = _timed(commands[name])
            cpus[name].append(_cpu_of_children() - before)
            return seconds

        seconds = interleave({name: lambda name=name: run(name) for name in commands}, rounds)  # type: ignore[misc]  # a default binds
        peaks = {name: [_peak_mb(commands[name]) for _ in range(_MEMORY_ROUNDS)] for name in commands}
    found = tuple(
        Opening(name, Spread.of(seconds[name]), Spread.of(cpus[name]), Spread.of(peaks[name])) for name in commands
    )
    return OpeningCost(written, nbytes / 1e6, rounds, found)


def _cpu_of_children() -> float:
    """CPU seconds of all processes that were started and waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _timed(arguments: Sequence[str]) -> float:
    """Wall seconds of one command."""
    began = time.perf_counter()
    with _running(arguments) as process:
        process.wait()
        return time.perf_counter() - began


def _peak_mb(arguments: Sequence[str]) -> float:
    """Peak memory in MB of one command."""
    peak = 0
    with _running(arguments) as process:
        while process.poll() is None:
            peak = max(peak, _tree_pss(process.pid))
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_SAMPLE_S)
    return peak / 1e6


@contextlib.contextmanager
def _running(arguments: Sequence[str]) -> Iterator[subprocess.Popen[bytes]]:
    """A command's process, to be waited for.

    Raises:
        RuntimeError: It failed, with what it said.
    """
    with tempfile.TemporaryFile() as said:
        command = [sys.executable, "-m", "tracekv.cli", *arguments]
        process = subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT)
        yield process
        code = process.wait()
        if code:
            said.seek(0)
            told = said.read().decode(errors="replace").strip()
            raise RuntimeError(f"tracekv: `tracekv {arguments[0]}` ended with {code}: {told[-500:]}")


def _tree_pss(pid: int) -> int:
    """Bytes of a process and its children, shared pages counted once."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:  # it has just ended
        return 0
    own = next((int(line.split()[1]) << 10 for line in rollup.splitlines() if line.startswith("Pss:")), 0)
    return own + sum(_tree_pss(int(child)) for child in children)


def body(cost: OpeningCost) -> str:
    """The part of docs/performance.md."""
    from tracekv.bench import page

    goals = {"rules": ("", "")}
    rows = []
    for each in cost.commands:
        seconds, memory = goals.get(each.name, ("<= 5", "<= 500"))
        rows.append((f"`{_SHOWN[each.name]}`", each.seconds, seconds, each.cpu_s, each.peak_mb, memory))
    told = (
        f"{page.machine('msgspec', 'rich')}. A directory of {cost.records:,} records ({cost.journal_mb:,.0f} MB) of four runs "
        f"of two ranks, half as ring files, half as archives; {cost.rounds} rounds, a process of its own each time, and two more for "
        "the memory. The last row judges every record; the others run no rules, but `explain` those of its one request."
    )
    return f"{told}\n\n{page.table(('', 's', 'goal', 'CPU s', 'MB', 'goal'), rows)}"


_SHOWN = {
    "explain": "tracekv explain REQUEST",
    "top": "tracekv top --once",
    "report": "tracekv report --no-rules",
    "rules": "tracekv explain --violations",
}
