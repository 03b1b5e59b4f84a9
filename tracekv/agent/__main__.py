"""``python -m tracekv.agent [--detach] DIRECTORY``: the agent's process."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tracekv.agent.lock import AgentLock


def main(arguments: list[str]) -> int:
    """Be the agent; returns the exit status."""
    directory = Path(arguments[-1])
    lock = AgentLock(directory)
    if not lock.acquire():
        return 0
    is_detached = arguments[:1] == ["--detach"]
    if is_detached and os.fork():
        # The child goes on with the lock, and whoever started this has nothing to wait for.
        os._exit(0)
    from tracekv.agent.main import be_unobtrusive, run_agent

    if is_detached:
        be_unobtrusive()
    return run_agent(directory, lock, own_log=sys.stderr.fileno() if is_detached else None)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
