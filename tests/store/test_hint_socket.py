"""Hints from other processes: who may give them, what becomes of bad ones, and the command that gives them."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import stat
import struct

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from tests.store.node import DEPLOYMENT, FULL, keys
from tracekv.cli.app import app
from tracekv_fsspec import hint_socket
from tracekv_fsspec.hint_socket import HintAnswer, HintRequest, address_of, send_hint, sockets
from tracekv_fsspec.keys import KeyChain, namespace_digest

TOKENS = 32


@pytest.fixture
def engine(node, tmp_path):
    """A node with three stored blocks of a salted prompt, listening; its prompt."""
    prompt = list(range(3 * TOKENS))
    chain = KeyChain(namespace_digest(DEPLOYMENT.digest(), cache_salt="tenant"), TOKENS)
    chain.extend(prompt)
    node().save(chain.keys)
    here = node()
    here.prompt, here.chain, here.folder = prompt, chain, tmp_path / "journals"
    here.stager.listen(here.folder)
    (here.path,) = sockets(here.folder)
    return here


def raw(path, data, *, then_close=False):
    """Send bytes; what comes back, or b"" where the connection was ended."""
    with socket.socket(socket.AF_UNIX) as peer:
        peer.settimeout(30)
        with address_of(path) as address:
            peer.connect(address)
        with contextlib.suppress(BrokenPipeError):  # refused before it was read: the answer is there all the same
            peer.sendall(data)
            if then_close:
                peer.shutdown(socket.SHUT_WR)
        try:
            return peer.recv(1 << 16)
        except ConnectionResetError:
            return b""


def framed(data):
    return struct.pack("<I", len(data)) + data


def test_tokens_are_staged_in_their_salts_namespace(engine):
    request = HintRequest(tokens=[*engine.prompt, *range(TOKENS), 5], cache_salt="tenant", wait_ms=30_000)
    assert send_hint(engine.path, request) == HintAnswer(staged=3, queued=0, unknown=1)
    assert all(engine.stager.arena.holds(FULL, key) for key in engine.chain.keys)
    assert send_hint(engine.path, HintRequest(tokens=engine.prompt)).unknown == 3


def test_keys_are_staged_as_they_are(engine):
    request = HintRequest(keys=[*engine.chain.keys, *keys(2)], wait_ms=30_000)
    assert send_hint(engine.path, request) == HintAnswer(staged=3, queued=0, unknown=2)


def test_a_hint_finds_what_was_committed_just_before_it(engine, node):
    node().save(keys(2, seed=7))
    assert send_hint(engine.path, HintRequest(keys=keys(3, seed=7), wait_ms=30_000)) == HintAnswer(2, 0, 1)


def test_the_socket_is_its_owners_alone_and_goes_with_the_engine(engine):
    assert stat.S_IMODE(engine.path.stat().st_mode) == 0o600
    engine.stager.close()
    assert sockets(engine.folder) == []


def test_a_folder_whose_path_is_longer_than_a_sockets_address_will_do(node, tmp_path):
    here = node()
    folder = tmp_path.joinpath(*["a folder of some depth"] * 8)
    here.stager.listen(folder)
    (path,) = sockets(folder)
    assert len(str(path)) > 107
    assert send_hint(path, HintRequest(keys=[bytes(16)])).error == ""


def test_a_peer_of_another_user_is_refused(engine, monkeypatch):
    monkeypatch.setattr(hint_socket.os, "geteuid", lambda: 4321)
    monkeypatch.setattr(hint_socket, "_PEER", FakePeer(1234))
    for _ in range(20):  # before and after the peer has sent
        assert b"its own user" in raw(engine.path, b"")
    assert "its own user" in send_hint(engine.path, HintRequest(keys=[bytes(16)] * 100_000)).error
    assert not engine.stager.arena.holds(FULL, engine.chain.keys[0])


class FakePeer:
    def __init__(self, uid):
        self.size = 12
        self._uid = uid

    def unpack(self, data):
        return 1, self._uid, 1


@pytest.mark.parametrize(
    "message",
    [
        b"\xc1",
        msgspec.msgpack.encode({"tokens": [1], "keys": [bytes(16)]}),
        msgspec.msgpack.encode({}),
        msgspec.msgpack.encode({"tokens": [-1]}),
        msgspec.msgpack.encode({"tokens": [1 << 32]}),
        msgspec.msgpack.encode({"tokens": [1], "wait_ms": 10**9}),
        msgspec.msgpack.encode({"keys": [b"short"]}),
        msgspec.msgpack.encode({"tokens": [1], "path": "/etc"}),
        b"\x91" * 10_000,
    ],
    ids=["no msgpack", "both", "neither", "negative", "too large", "too long", "short key", "other field", "nested"],
)
def test_a_message_that_is_no_hint_gets_an_error_and_the_engine_goes_on(engine, message):
    answer = msgspec.msgpack.decode(raw(engine.path, framed(message))[4:], type=HintAnswer)
    assert answer.error
    assert send_hint(engine.path, HintRequest(keys=engine.chain.keys, wait_ms=30_000)).staged == 3


def test_a_message_longer_than_any_hint_is_not_read(engine):
    answer = raw(engine.path, struct.pack("<I", hint_socket.MOST_BYTES + 1) + b"x" * 100)
    assert str(hint_socket.MOST_BYTES).encode() in answer


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=300))
def test_whatever_is_sent_the_engine_goes_on(engine, data):
    raw(engine.path, data, then_close=True)
    assert send_hint(engine.path, HintRequest(keys=engine.chain.keys)).error == ""


def test_peers_that_say_nothing_dont_keep_the_others_out_for_long(engine, monkeypatch):
    monkeypatch.setattr(hint_socket, "PEER_S", 0.05)
    silent = []
    for _ in range(3 * hint_socket.MOST_CONNECTIONS):
        silent.append(socket.socket(socket.AF_UNIX))
        with address_of(engine.path) as address:
            silent[-1].connect(address)
    for peer in silent:
        peer.settimeout(30)
        assert peer.recv(1) == b""  # each was ended by the engine
        peer.close()
    assert send_hint(engine.path, HintRequest(keys=engine.chain.keys)).error == ""


def test_a_forked_child_leaves_its_parents_socket_alone(engine):
    child = os.fork()
    if child == 0:
        try:
            engine.stager._hints.close(1)
            os._exit(0)
        except BaseException:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    assert send_hint(engine.path, HintRequest(keys=engine.chain.keys, wait_ms=30_000)).staged == 3


def test_a_dead_engines_socket_is_removed_by_the_next(engine, monkeypatch):
    monkeypatch.chdir(engine.folder)  # a socket's address is short, and where tests run may be deep
    with socket.socket(socket.AF_UNIX) as gone:
        gone.bind(f"{hint_socket.PREFIX}1-dead{hint_socket.SUFFIX}")
    hint_socket._remove_dead(engine.folder)
    assert sockets(engine.folder) == [engine.path]


def test_without_a_usable_folder_the_engine_runs_without_hints(node, tmp_path, caplog):
    here = node()
    (tmp_path / "file").write_bytes(b"")
    here.stager.listen(tmp_path / "file" / "folder")
    assert "no hints are taken" in caplog.text
    here.save(keys(1))


@pytest.mark.parametrize("form", ["tokens", "keys"])
def test_the_command_tells_every_engine_of_the_folder(engine, monkeypatch, form):
    monkeypatch.setenv("TRACEKV_JOURNAL_DIR", str(engine.folder))
    given = engine.prompt if form == "tokens" else [key.hex() for key in engine.chain.keys]
    options = ["--salt", "tenant"] if form == "tokens" else ["--keys"]
    done = CliRunner().invoke(app, ["prefetch", *options, "--wait", "30", "--json"], input=json.dumps(given))
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout) == {
        "engines": {str(engine.path): {"staged": 3, "queued": 0, "unknown": 0, "error": ""}}
    }


@pytest.mark.parametrize("given", ['["424242"]', "[424242.5]", "{}", "no json 424242", "[-424242]"])
def test_a_bad_prompt_is_refused_without_being_told(engine, given):
    done = CliRunner().invoke(app, ["prefetch", "--socket", str(engine.path)], input=given)
    assert done.exit_code == 2
    assert "token ids" in done.output
    assert "424242" not in done.output


def test_without_an_engine_the_command_fails(tmp_path, monkeypatch):
    monkeypatch.setenv("TRACEKV_JOURNAL_DIR", str(tmp_path))
    done = CliRunner().invoke(app, ["prefetch"], input="[1]")
    assert done.exit_code == 1
    assert "no engine" in done.output
