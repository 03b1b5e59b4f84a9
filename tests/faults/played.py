"""Each play of the corpus once per session, whichever test asks for it."""

from __future__ import annotations

import functools

import torch

from tracekv.testing.corpus import CLEAN, FAULTS, judge, record, verdict


@functools.cache
def records(name):
    torch.set_num_threads(1)
    play = CLEAN[name] if name in CLEAN else FAULTS[name].play
    return record(play)


@functools.cache
def findings(name):
    return judge(records(name))


def verdicts():
    return {fault.id: verdict(fault, findings(fault.id)) for fault in FAULTS.values()}
