"""Fixtures of the tests that trace a run in this process: small models, built once, and what was recorded."""

from __future__ import annotations

import functools

import pytest

from tracekv.journal.current import current


@functools.cache
def _model(preset):
    from tracekv.harness import build_model  # only where a model is asked for: it takes torch

    return build_model(preset, num_hidden_layers=2 if preset == "llama" else 4)


@pytest.fixture
def model():
    """Builds a small model by the name of its preset; the same one each time."""
    return _model


@pytest.fixture
def records():
    """Everything recorded so far, optionally of one kind."""

    def read(kind=object):
        assert current.journal is not None, "nothing is traced"
        found, _, lost = current.journal.read(0)
        assert lost == 0
        return [record for record in found if isinstance(record, kind)]

    return read
