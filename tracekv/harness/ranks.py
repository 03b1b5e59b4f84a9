"""Tensor-parallel ranks as processes: starts them, hands them jobs, and leaves none behind.

.. code-block:: python

   job = RankJob(rounds=[[Prompt(tokens, 8)]], scheduler="my_pkg.connector:Leader", worker="my_pkg.connector:Worker")
   first, second = run_ranks(2, job)

Every rank builds the same model and keeps its share of the heads, so its pages hold its own KV heads. All of them take the
same scheduling decisions, since all see the same requests, answers and tokens; the connector's scheduler lives on rank 0.
"""

from __future__ import annotations

import multiprocessing
import pickle
from collections.abc import Iterable
from multiprocessing import connection
from time import monotonic
from types import TracebackType
from typing import Any

from tracekv.harness import rank_process
from tracekv.harness.gloo import COLLECTIVES, meeting_point
from tracekv.harness.jobs import Prompt, RankFailure, RankJob, RankResult, RanksFailed, Remark, Served, exit_of

__all__ = ["Prompt", "RankFailure", "RankJob", "RankResult", "Ranks", "RanksFailed", "Remark", "Served", "run_ranks"]

_POLL_S = 0.1
#: So long without a change, every rank that isn't done inside a collective: they wait for each other, or for one that is done.
_STUCK_S = 5.0
#: The same where a rank has failed already: it will never come.
_STUCK_AFTER_FAILURE_S = 1.0
_LEAVE_S = 5.0


class Ranks:
    """``world`` processes that run jobs in lock step, one job after another.

    They are spawned, so a script that makes some has to guard its own start (``if __name__ == "__main__":``). What a job
    leaves in the processes (imported modules and their globals) is there for the next one. Closed, or garbage, it leaves no
    process behind; nor does a failed job, after which there is nothing left to run another.

    Args:
        world: How many.
        timeout_s: Most seconds of a job, the start of the processes included; none of a rank's waits is longer.
    """

    def __init__(self, world: int, *, timeout_s: float = 120.0) -> None:
        self.world = world
        self._timeout_s = timeout_s
        spawn = multiprocessing.get_context("spawn")
        # The ranks meet here: the system chose the port, and nobody else can have it.
        self._store = meeting_point()
        self._whereabouts: Any = spawn.Array("q", world, lock=False)
        self._pipes: list[connection.Connection] = []
        self._processes: list[Any] = []
        for rank in range(world):
            mine, theirs = spawn.Pipe()
            process = spawn.Process(
                target=rank_process.main,
                args=(rank, world, self._store.port, self._whereabouts, theirs, timeout_s),
                name=f"tracekv-rank-{rank}",
                daemon=True,
            )
            process.start()
            theirs.close()
            self._pipes.append(mine)
            self._processes.append(process)

    @property
    def pids(self) -> list[int]:
        """The processes, by rank; empty once they were ended."""
        return [process.pid for process in self._processes]

    def run(self, job: RankJob, *, timeout_s: float | None = None) -> list[RankResult]:
        """Run a job on every rank, in at most ``timeout_s`` (None: what the ranks were made with).

        Returns:
            What each rank tells, by rank.

        Raises:
            RanksFailed: A rank raised, died, or took too long; or the ranks wait for each other.
            RuntimeError: They were ended before.
        """
        if not self._processes:
            raise RuntimeError("tracekv: these ranks were ended; start new ones")
        payload = pickle.dumps(job)
        for pipe in self._pipes:
            try:
                pipe.send_bytes(payload)
            except OSError:  # it died meanwhile: found out below, with its exit code
                continue
        results: dict[int, RankResult] = {}
        failures: dict[int, RankFailure] = {}
        remarks: list[Remark] = []
        self._collect(results, failures, remarks, self._timeout_s if timeout_s is None else timeout_s)
        if failures:
            self._end()
            raise RanksFailed(failures, remarks)
        return [results[rank] for rank in range(self.world)]

    def close(self) -> None:
        """End the processes; those that don't leave by themselves are killed, by their ids."""
        for pipe in self._pipes:
            try:
                pipe.send_bytes(pickle.dumps(None))
            except OSError:
                continue
        deadline = monotonic() + _LEAVE_S
        for process in self._processes:
            process.join(max(0.0, deadline - monotonic()))
        self._end()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self._end()

    # -- waiting for answers ---------------------------------------------------------------------------------------

    def _collect(
        self,
        results: dict[int, RankResult],
        failures: dict[int, RankFailure],
        remarks: list[Remark],
        timeout_s: float,
    ) -> None:
        now = changed_at = monotonic()
        deadline = now + timeout_s
        seen: list[int] = []
        while waiting := [rank for rank in range(self.world) if rank not in results and rank not in failures]:
            for answer in self._receive(waiting):
                if isinstance(answer, Remark):
                    remarks.append(answer)
                elif isinstance(answer, RankResult):
                    results[answer.rank] = answer
                else:
                    failures[answer.rank] = answer
            now = monotonic()
            where = [self._whereabouts[rank] for rank in waiting]
            if where != seen or not all(where):
                seen, changed_at = where, now
            patience = _STUCK_AFTER_FAILURE_S if failures else _STUCK_S
            if now - changed_at > patience:
                failures |= {rank: RankFailure(rank, "blocked", self._collective(rank)) for rank in waiting}
            elif now > deadline:
                failures |= {rank: self._unfinished(rank, timeout_s) for rank in waiting}

    def _receive(self, waiting: Iterable[int]) -> list[RankResult | RankFailure | Remark]:
        sentinels = {rank: self._processes[rank].sentinel for rank in waiting}
        pipes = {rank: self._pipes[rank] for rank in waiting}
        ready = connection.wait([*pipes.values(), *sentinels.values()], _POLL_S)
        answers: list[RankResult | RankFailure | Remark] = []
        for rank in waiting:
            if pipes[rank] not in ready and sentinels[rank] not in ready:
                continue
            try:
                if pipes[rank].poll():
                    answers.append(pickle.loads(pipes[rank].recv_bytes()))  # noqa: S301  # from our own process
                    continue
            except (EOFError, OSError):
                pass
            self._processes[rank].join(_LEAVE_S)
            answers.append(RankFailure(rank, "died", exit_of(self._processes[rank].exitcode)))
        return answers

    def _collective(self, rank: int) -> str:
        return COLLECTIVES[self._whereabouts[rank] % 8]

    def _unfinished(self, rank: int, timeout_s: float) -> RankFailure:
        where = self._collective(rank) or "computing, or inside the connector"
        return RankFailure(rank, "unfinished", f"{where}, after {timeout_s:g} s")

    def _end(self) -> None:
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.join(_LEAVE_S)
            if process.is_alive():
                process.kill()
                process.join()
            process.close()
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes = [], []


def run_ranks(world: int, job: RankJob, *, timeout_s: float = 120.0) -> list[RankResult]:
    """Start ``world`` ranks, run one job, end them. See :class:`Ranks`."""
    with Ranks(world, timeout_s=timeout_s) as ranks:
        return ranks.run(job)
