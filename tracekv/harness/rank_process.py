"""What one rank's process does: join the others, then run jobs until it is told to end."""

from __future__ import annotations

import contextlib
import importlib
import logging
import multiprocessing
import os
import pickle
import signal
import socket
import threading
import traceback
from collections.abc import Iterator, Mapping, MutableSequence
from multiprocessing.connection import Connection
from typing import Any

import torch

from tracekv.contract import Runtime, use_runtime
from tracekv.harness.executor import Executor
from tracekv.harness.gloo import GlooRanks, PeerLost
from tracekv.harness.heads import keep_heads
from tracekv.harness.jobs import RankFailure, RankJob, RankResult, Remark, Served
from tracekv.harness.models import build_model, load_model
from tracekv.harness.requests import Request


def main(
    rank: int, world: int, port: int, whereabouts: MutableSequence[int], launcher: Connection, timeout_s: float
) -> None:
    """Run the jobs that come through ``launcher``, pickled; each is answered by a result or a failure."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher ends its ranks
    threading.Thread(target=_end_with_launcher, name="tracekv-launcher", daemon=True).start()
    torch.set_num_threads(1)  # the ranks share the machine's cores
    ranks = GlooRanks(rank, world, port, whereabouts, timeout_s)
    logging.getLogger("tracekv.harness").addHandler(_Remarks(rank, launcher))
    use_runtime(Runtime(rank, world, socket.gethostname(), ranks.connector_allgather))
    while (job := _next(launcher)) is not None:
        answer: RankResult | RankFailure
        try:
            answer = _run(job, ranks)
            payload = pickle.dumps(answer)
        except PeerLost as error:
            payload = pickle.dumps(RankFailure(rank, "blocked", error.collective, traceback.format_exc()))
        except Exception as error:
            # The others may be waiting in a collective, so this process stays until it is ended: they would fail otherwise.
            what = f"{type(error).__name__}: {error}"
            payload = pickle.dumps(RankFailure(rank, "raised", what, traceback.format_exc()))
        launcher.send_bytes(payload)
    ranks.leave()


def _end_with_launcher() -> None:
    """Nobody would end a rank that waits for its peers, or in its connector, once the launcher was killed."""
    launcher = multiprocessing.parent_process()
    if launcher is not None:
        launcher.join()
        os._exit(1)


class _Remarks(logging.Handler):
    """Lets the launcher know what went wrong in a rank that goes on: its peers may not."""

    def __init__(self, rank: int, launcher: Connection) -> None:
        super().__init__(logging.ERROR)
        self._rank = rank
        self._launcher = launcher

    def emit(self, record: logging.LogRecord) -> None:
        what = record.getMessage().removeprefix("tracekv: ")
        if record.exc_info and record.exc_info[1] is not None:
            what += f" ({type(record.exc_info[1]).__name__}: {record.exc_info[1]})"
        self._launcher.send_bytes(pickle.dumps(Remark(self._rank, what)))


def _next(launcher: Connection) -> RankJob | None:
    try:
        job: RankJob | None = pickle.loads(launcher.recv_bytes())  # noqa: S301  # from the process that started this one
    except EOFError:  # it is gone
        return None
    return job


def _run(job: RankJob, ranks: GlooRanks) -> RankResult:
    with _environ(job.environ), _session(job.traced):
        model = load_model(job.checkpoint) if job.checkpoint else build_model(job.preset, job.seed, **job.model_options)
        options = dict(job.executor_options)
        if ranks.world > 1:
            if not options.get("attention_dp"):
                keep_heads(model, ranks.rank, ranks.world, ranks.add_up)
            options["collectives"] = ranks
        executor = Executor(model, *_connector(job), **options)
        drive = _named(job.drive) if job.drive else None
        requests: list[Request] = []
        for prompts in job.rounds:
            mine = prompts[ranks.rank :: ranks.world] if options.get("attention_dp") else prompts
            submitted = [executor.submit(p.tokens, p.max_new_tokens, **p.options) for p in mine]
            requests += submitted
            if drive is not None:
                requests += drive(executor, submitted, *([] if job.script is None else [job.script])) or []
            executor.run()
        executor.shutdown()
        observed = _named(job.observe)(executor) if job.observe else None
        return RankResult(ranks.rank, [_served(request) for request in requests], dict(executor.calls), observed)


def _connector(job: RankJob) -> tuple[Any, ...]:
    classes = [_named(name) for name in (job.scheduler, job.worker) if name is not None]
    if job.traced:
        from tracekv import trace

        classes = [trace(cls) for cls in classes]
    return tuple(classes)


def _named(name: str) -> Any:
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


def _served(request: Request) -> Served:
    error = None if request.error is None else f"{type(request.error).__name__}: {request.error}"
    return Served(
        request.request_id,
        request.output_tokens,
        request.first_logits,
        request.device_tokens,
        request.honoured_tokens,
        request.passes,
        error,
    )


@contextlib.contextmanager
def _environ(variables: Mapping[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextlib.contextmanager
def _session(is_traced: bool) -> Iterator[None]:
    """Export what a traced job recorded, and forget its session: the next one may have other settings."""
    try:
        yield
    finally:
        if is_traced:
            from tracekv import capture

            capture.shutdown(timeout_s=10)
