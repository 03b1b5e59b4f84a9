"""Two ranks as two threads that exchange pickles; one that waits for a peer that is gone is told so."""

from __future__ import annotations

import pickle
import threading


class Blocked(Exception):
    """The peer has ended; with MPI this rank would wait for ever."""

    def __init__(self, collective):
        super().__init__(collective)
        self.collective = collective


class Meeting:
    """Where the two ranks leave what they bring to a collective."""

    def __init__(self):
        self.changed = threading.Condition()
        self.brought = [[], []]
        self.gone = set()


class ThreadRanks:
    """One rank's collectives."""

    def __init__(self, rank, meeting):
        self.rank, self.world = rank, 2
        self.entered = []
        self._meeting = meeting

    def broadcast(self, value):
        return pickle.loads(self._exchange("broadcast", value if self.rank == 0 else None)[0])

    def allgather(self, value):
        return [pickle.loads(data) for data in self._exchange("allgather", value)]

    def _exchange(self, collective, value):
        payload = pickle.dumps(value)
        meeting, round_ = self._meeting, len(self.entered)
        self.entered.append(collective)
        with meeting.changed:
            meeting.brought[self.rank].append(payload)
            meeting.changed.notify_all()
            peer = 1 - self.rank
            meeting.changed.wait_for(lambda: len(meeting.brought[peer]) > round_ or peer in meeting.gone)
            if len(meeting.brought[peer]) <= round_:
                raise Blocked(collective)
            return [meeting.brought[rank][round_] for rank in range(2)]


def on_two_ranks(rank_main):
    """``rank_main(ranks)`` on a thread for each rank; its answers, by rank. What one raises is raised here."""
    meeting, answers, errors = Meeting(), {}, []

    def run(rank):
        try:
            answers[rank] = rank_main(ThreadRanks(rank, meeting))
        except BaseException as error:
            errors.append(error)
        finally:
            with meeting.changed:
                meeting.gone.add(rank)
                meeting.changed.notify_all()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [answers[rank] for rank in range(2)]
