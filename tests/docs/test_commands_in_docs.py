"""What the pages tell a person to type, typed: each page's blocks in one shell, in order, in a folder with a demo's journals.

Three kinds of commands are not run again but checked by what they call: ``tracekv demo`` (its arguments are parsed; one demo has run
for all pages), ``make`` (what it would run, and that this is there) and ``pip install`` (that the extras exist and what they need is
installed). A block that can't run here says ``no-run`` behind its language.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from importlib.metadata import metadata, requires, version
from pathlib import Path

import pytest
import typer
from packaging.requirements import Requirement

from tests.docs.fences import NO_RUN, PROGRAMS, ROOT, SHELLS, Block, blocks_of, pages
from tests.support.collector import Sink
from tracekv.cli.app import app
from tracekv.journal.directory import SUFFIX
from tracekv.journal.process import describe_self
from tracekv.journal.ring import RingJournal

BIN = Path(sys.executable).parent
#: Functions in the place of what is not run again: each puts its arguments into a file, a line per command.
PRELUDE = """
noted() { printf '%q ' "$@" >> "$NOTED"; echo >> "$NOTED"; }
make() { noted make "$@"; }
pip() { noted pip "$@"; }
promtool() { noted promtool "$@"; }
tracekv() { if [ "$1" = demo ]; then noted tracekv "$@"; else command tracekv "$@"; fi; }
set -ex
"""


def groups():
    """Lines to run by page; the runbooks are one page, and what several of them say is run once."""
    found = {}
    for page, blocks in pages().items():
        name = "docs/runbooks" if page.startswith("docs/runbooks/") else page
        lines = found.setdefault(name, [])
        for block in blocks:
            if block.runs:
                lines += [line for line in block.lines if name == page or line not in lines]
    return {name: "\n".join(lines) for name, lines in found.items() if lines}


GROUPS = groups()


def quiet_environ(**more):
    """Nothing of tracekv's, OpenTelemetry's or AWS's but ``more``, and nothing of the make that may run these tests."""
    left_out = ("TRACEKV_", "OTEL_", "AWS_", "MAKE", "MFLAGS", "ARGS")
    return {k: v for k, v in os.environ.items() if not k.startswith(left_out)} | {"OMP_NUM_THREADS": "1"} | more


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """A folder with ``journals`` and ``kv``: what the demo of the page for newcomers leaves, but for its traffic."""
    folder = tmp_path_factory.mktemp("demo")
    command = [BIN / "tracekv", "demo", "--preset", "gemma3", "--store", (folder / "kv").as_uri()]
    environ = quiet_environ(TRACEKV_JOURNAL_DIR=str(folder / "journals"), XDG_CACHE_HOME=str(folder / "cache"))
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr
    # An engine that runs, too, for what is said to running ones: this process has its journal.
    live = RingJournal.create(folder / "journals" / f"live{SUFFIX}", 1 << 20, describe_self())
    yield folder
    live.close()


@pytest.fixture
def like_a_checkout(demo, tmp_path):
    """A folder of the page's own, with the checkout's files, the demo's journals and a copy of its store."""
    for path in ROOT.iterdir():
        if not path.name.startswith(".") and path.name not in ("site", "build", "dist"):
            (tmp_path / path.name).symlink_to(path)
    (tmp_path / "journals").symlink_to(demo / "journals")
    shutil.copytree(demo / "kv", tmp_path / "kv")
    return tmp_path


@pytest.fixture
def endpoint():
    sink = Sink()
    yield sink.url
    sink.close()


def typed(text, folder, **environ):
    """Run what a page says; the commands that are to be checked otherwise."""
    noted = folder / "noted"
    environ = (
        quiet_environ(NOTED=str(noted), HOME=str(folder), XDG_CACHE_HOME=str(folder / "cache"), COLUMNS="100") | environ
    )
    environ["PATH"] = f"{BIN}{os.pathsep}{environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", PRELUDE + text],
        cwd=folder,
        env=environ,
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    said = [line for line in done.stderr.splitlines() if not line.startswith(("++", "+ noted", "+ printf", "+ echo"))]
    assert done.returncode == 0, "\n".join([*said[-15:], done.stdout[-1500:]])
    return [shlex.split(line) for line in noted.read_text().splitlines()] if noted.exists() else []


@pytest.mark.slow
@pytest.mark.s3
@pytest.mark.parametrize("page", GROUPS)
def test_what_a_page_says_to_type_works(page, like_a_checkout, endpoint, s3_server):
    text = (
        GROUPS[page]
        .replace("http://localhost:4318", endpoint)
        .replace("s3://bucket/prefix", f"s3://{s3_server.bucket}/docs")
    )
    where = {"TRACEKV_JOURNAL_DIR": "journals", "TRACEKV_FSSPEC__URL": f"file://{like_a_checkout}/kv"}
    where["TRACEKV_FSSPEC__MODEL_ID"] = "demo"
    for command in typed(text, like_a_checkout, **where, **s3_server.environ()):
        check(command)


def check(command):
    """A command that isn't run again."""
    program, *arguments = command
    if program == "tracekv":
        parsed = typer.main.get_command(app).commands[arguments[0]]
        parsed.make_context(arguments[0], arguments[1:])
    elif program == "make":
        check_make(arguments)
    elif program == "pip":
        assert arguments[0] == "install"
        for name in arguments[1:]:
            check_requirement(Requirement(name))


def check_make(arguments):
    would = ["make", "--dry-run", "--old-file=.venv/.ready", *arguments]
    environ = quiet_environ()
    done = subprocess.run(would, cwd=ROOT, env=environ, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    called = [shlex.split(line) for line in done.stdout.splitlines() if line.startswith(".venv/bin/")]
    assert called, done.stdout
    for program, *rest in called:
        assert (BIN / Path(program).name).exists(), program
        if Path(program).name == "tracekv":
            check(["tracekv", *rest])


def check_requirement(wanted):
    assert wanted.name == "tracekv"
    assert wanted.extras <= set(metadata("tracekv").get_all("Provides-Extra"))
    for line in requires("tracekv"):
        needed = Requirement(line)
        if needed.name != "tracekv" and any(
            needed.marker.evaluate({"extra": each}) for each in wanted.extras if needed.marker
        ):
            assert needed.specifier.contains(version(needed.name), prereleases=True), line


@pytest.mark.prometheus
def test_promtool_says_yes_to_what_the_pages_have_it_check():
    lines = [line for text in GROUPS.values() for line in text.splitlines() if line.startswith("promtool ")]
    assert lines
    for line in lines:
        done = subprocess.run(shlex.split(line), cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("page", pages())
def test_every_command_is_in_a_block_that_runs_or_says_that_it_does_not(page):
    blocks = pages()[page]
    if page != "docs/cli.md":  # synopses, made from the commands themselves
        assert [block.lines for block in blocks if block.looks_like_shell and not block.is_shell] == []
    assert {word for block in blocks for word in block.info[1:]} <= {NO_RUN}


def test_our_programs_are_all_on_some_page():
    text = "\n".join(GROUPS.values())
    assert [name for name in PROGRAMS if f"{name} " not in text] == []
    assert len(GROUPS) > 8


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("tracekv explain 1\ntracekv nonsense", "No such command"),
        ("tracekv explain 999999", "no request 999999"),
        ("nonsense", "not found"),
    ],
)
def test_a_wrong_command_is_found(text, said, like_a_checkout):
    """The negative control of the whole."""
    with pytest.raises(AssertionError, match=said):
        typed(text, like_a_checkout, TRACEKV_JOURNAL_DIR="journals")


@pytest.mark.parametrize(
    "command",
    [
        ["tracekv", "demo", "--four", "3"],
        ["make", "nonsense"],
        ["make", "demo", "ARGS=--four"],
        ["pip", "install", "tracekv[nonsense]"],
    ],
)
def test_a_wrong_command_that_is_not_run_is_found_too(command):
    with pytest.raises(Exception, match=r"four|nonsense|No rule|s3"):
        check(command)


def test_blocks_are_read_with_their_marks():
    text = "```sh\na\n```\n\n```sh no-run\nb\n```\n\n    x\n\n```\ntracekv top\n```\n\n```python\npip = 1\n```\n"
    first, second, third, fourth = blocks_of(text)
    assert (first.runs, second.runs, third.runs, fourth.runs) == (True, False, False, False)
    assert [block.looks_like_shell for block in (first, second, third, fourth)] == [False, False, True, False]
    assert first == Block(("sh",), ("a",))
    assert first.info[0] in SHELLS
