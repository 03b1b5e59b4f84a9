"""What tracing costs a running engine: full detail for every request, exported through a real collector.

The engine has one core to itself; agent, collector and sink share the other.
"""

from __future__ import annotations

import http.server
import importlib.util
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec

from tracekv.bench.rounds import journal_folder


class StepCost(msgspec.Struct):
    """Beside a bare pair in the same process, whose turns alternate; spread over turns."""

    steps: int
    steps_per_s: float
    step_ms_bare: float
    step_slowdown_pct_median: float
    step_slowdown_pct_interval: list[float]
    step_slowdown_pct_p99: float
    engine_cpu_us_per_step: float
    engine_cpu_us_per_step_interval: list[float]
    spans_exported_per_s: float
    spans_exported: int
    spans_dropped: int
    agent_cpu_pct_of_core: float
    agent_rss_mb: float
    engine_rss_added_mb: float
    heavy_imports: list[str]


class _Sink:
    """Keeps what the collector sends, to be counted when the measurement is over."""

    def __init__(self) -> None:
        bodies: list[tuple[bytes, bool]] = []

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                bodies.append((body, self.headers.get("Content-Encoding") == "gzip"))
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self._bodies = bodies
        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    @property
    def port(self) -> int:
        return int(self.server.server_address[1])

    def span_times(self) -> list[int]:
        """Start of every span that arrived, by span id, so that a repeated one counts once."""
        import gzip

        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        starts: dict[bytes, int] = {}
        for body, is_zipped in self._bodies:
            request = ExportTraceServiceRequest.FromString(gzip.decompress(body) if is_zipped else body)
            for resource in request.resource_spans:
                for scope in resource.scope_spans:
                    starts.update((span.span_id, span.start_time_unix_nano) for span in scope.spans)
        return sorted(starts.values())


def measure(turns: int = 500) -> StepCost:
    """Run the engine for ``turns`` turns of each pair (two steps a turn).

    Raises:
        RuntimeError: The collector isn't installed, or there are not two cores.
    """
    found = importlib.util.find_spec("rotel")
    cores = sorted(os.sched_getaffinity(0))
    if found is None or found.origin is None:
        raise RuntimeError("tracekv: the collector isn't installed: pip install --pre rotel")
    collector = str(Path(found.origin).with_name("rotel-agent"))
    if len(cores) < 2:
        raise RuntimeError("tracekv: the engine needs a core of its own beside the agent's; there is only one")
    engine_core, other_core = cores[0], cores[1]
    with journal_folder() as folder, ExitStack() as running:
        os.sched_setaffinity(0, {other_core})
        running.callback(os.sched_setaffinity, 0, set(cores))
        sink = _Sink()
        running.callback(sink.server.shutdown)
        port = running.enter_context(
            _collector(collector, sink.port, Path(running.enter_context(tempfile.TemporaryDirectory())))
        )
        environ = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("OTEL_", "TRACEKV_"))},
            "TRACEKV_JOURNAL_DIR": folder,
            "TRACEKV_DETAIL": "full",
            "TRACEKV_STEP_SAMPLE": "1",
            "TRACEKV_AGENT": "external",
            "TRACEKV_BUDGET_PCT": "100",
            "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{port}",
            "OTEL_METRICS_EXPORTER": "none",
        }
        agent = running.enter_context(
            _process([sys.executable, "-m", "tracekv.cli", "agent", "--stay", folder], environ)
        )
        time.sleep(1.0)  # the agent is up before it is measured, whatever it does to get there
        cpu_before = _cpu_s(agent.pid)
        engine = [sys.executable, "-m", "tracekv.bench.steps_engine", str(turns), str(engine_core)]
        done = subprocess.run(engine, env=environ, stdout=subprocess.PIPE, check=True)
        agent_cpu_s, agent_kib = _cpu_s(agent.pid) - cpu_before, _peak_kib(agent.pid)
        told = json.loads(done.stdout)
        expected = _expected_spans(Path(folder))
        spans = _wait_for(sink, expected)
        return _judge(told, spans, expected, agent_cpu_s, agent_kib, _added_kib(environ))


def _judge(
    told: dict[str, Any], spans: list[int], expected: int, agent_cpu_s: float, agent_kib: int, added_kib: int
) -> StepCost:
    bare, traced = told["wall_ns"]["bare"], told["wall_ns"]["traced"]
    slowdowns = [100 * (statistics.median(t) / statistics.median(b) - 1) for b, t in zip(bare, traced, strict=True)]
    cpu = [
        (t - b) / 1000 for b, t in zip(told["cpu_ns_per_step"]["bare"], told["cpu_ns_per_step"]["traced"], strict=True)
    ]
    all_bare, all_traced = sorted(chain.from_iterable(bare)), sorted(chain.from_iterable(traced))
    # The traced pair runs half of the time; what it leaves is exported in that time or dropped.
    traced_s = sum(all_traced) / 1e9
    return StepCost(
        steps=len(all_traced),
        steps_per_s=len(all_traced) / traced_s,
        step_ms_bare=statistics.median(all_bare) / 1e6,
        step_slowdown_pct_median=statistics.median(slowdowns),
        step_slowdown_pct_interval=_interval(slowdowns),
        step_slowdown_pct_p99=100 * (_percentile(all_traced, 0.99) / _percentile(all_bare, 0.99) - 1),
        engine_cpu_us_per_step=statistics.median(cpu),
        engine_cpu_us_per_step_interval=_interval(cpu),
        spans_exported_per_s=len(spans) / traced_s,
        spans_exported=len(spans),
        spans_dropped=expected - len(spans),
        agent_cpu_pct_of_core=100 * agent_cpu_s / traced_s,
        agent_rss_mb=agent_kib / 1024,
        engine_rss_added_mb=added_kib / 1024,
        heavy_imports=told["heavy"],
    )


#: In an interpreter that has imported nothing yet: what tracekv's import and one traced pair add to its private memory.
_ADDED = """
def private():
    with open("/proc/self/smaps_rollup") as rollup:
        fields = dict(line.split(":", 1) for line in rollup if ":" in line)
    return sum(int(fields[name].split()[0]) for name in ("Private_Clean", "Private_Dirty"))

before = private()
from tracekv.bench.overhead import NullScheduler, NullWorker, TensorShape
from tracekv.capture import trace
pair = trace(NullScheduler)(None), trace(NullWorker)(None)
pair[1].register_kv_caches(TensorShape())
from tracekv.journal.current import current
# The ring is mapped by this process alone, so it counts as private; it is not what is asked for.
print(private() - before - current.journal.path.stat().st_size // 1024)
"""


def _added_kib(environ: dict[str, str]) -> int:
    with journal_folder() as folder:
        quiet = {**environ, "TRACEKV_AGENT": "off", "TRACEKV_JOURNAL_DIR": folder}
        done = subprocess.run([sys.executable, "-c", _ADDED], env=quiet, stdout=subprocess.PIPE, check=True)
    return int(done.stdout)


def _interval(values: list[float]) -> list[float]:
    """The middle 95 % of the median's bootstrap, as plain order statistics of a binomial."""
    ordered = sorted(values)
    count = len(ordered)
    reach = round(0.98 * count**0.5)
    low, high = max(0, count // 2 - reach), min(count - 1, count // 2 + reach)
    return [ordered[low], ordered[high]]


def _percentile(ordered: list[int], share: float) -> int:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def _expected_spans(folder: Path) -> int:
    """Spans that the journals' records stand for, counted by the views without exporting."""
    from tracekv.journal.opening import open_journals
    from tracekv.views.spans import SpanView

    count = 0
    for reader in open_journals(folder, patience_ns=0):
        view = SpanView(detail="full", hash_request_ids=False)
        cursor = 0
        while True:
            records, cursor, lost = reader.read(cursor)
            if not records and not lost:
                break
            for record in records:
                count += len(view.feed(record))
        count += len(view.close())
        reader.close()
    return count


def _wait_for(sink: _Sink, expected: int, timeout_s: float = 20.0) -> list[int]:
    ends = time.monotonic() + timeout_s
    while len(spans := sink.span_times()) < expected and time.monotonic() < ends:
        time.sleep(0.5)
    return spans


@contextmanager
def _collector(program: str, sink_port: int, folder: Path) -> Iterator[int]:
    grpc, http_port = _free_port(), _free_port()
    arguments = [
        program, "start",
        "--pid-file", str(folder / "rotel.pid"),
        "--log-file", str(folder / "rotel.log"),
        "--batch-timeout", "50ms",
        "--otlp-grpc-endpoint", f"127.0.0.1:{grpc}",
        "--otlp-http-endpoint", f"127.0.0.1:{http_port}",
        "--exporter", "otlp",
        "--otlp-exporter-endpoint", f"http://127.0.0.1:{sink_port}",
        "--otlp-exporter-protocol", "http",
    ]  # fmt: skip
    with _process(arguments, dict(os.environ)):
        ends = time.monotonic() + 10
        while time.monotonic() < ends:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", http_port)) == 0:
                    break
            time.sleep(0.05)
        yield http_port


@contextmanager
def _process(arguments: list[str], environ: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(arguments, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _peak_kib(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1])
    return 0
