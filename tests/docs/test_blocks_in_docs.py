"""Blocks of the pages that are no commands: YAML that parses, Python that runs, settings that exist."""

from __future__ import annotations

import re

import pytest
import yaml

from tests.docs.fences import ROOT, blocks_of, pages
from tracekv import settings
from tracekv_fsspec.settings import Settings as FsspecSettings

PAGES = pages()
#: Names that a page makes up for something that isn't here.
MADE_UP = {"TRACEKV_MEMORY__MAX_BLOCKS", "TRACEKV_MEMORY__"}
VARIABLE = re.compile(r"TRACEKV_[A-Z0-9_]+")


def of_language(page, language):
    return ["\n".join(block.lines) for block in PAGES[page] if block.info[:1] == (language,)]


@pytest.mark.parametrize("page", [page for page in PAGES if of_language(page, "yaml")])
def test_every_yaml_block_is_yaml(page):
    for text in of_language(page, "yaml"):
        assert isinstance(yaml.safe_load(text), dict)


def test_the_pod_s_settings_are_ours_and_its_containers_share_user_and_memory():
    (text,) = of_language("docs/deploy.md", "yaml")
    spec = yaml.safe_load(text)["spec"]
    assert spec["securityContext"]["runAsNonRoot"] is True
    environ = {}
    for container in spec["containers"]:
        assert {"name": "shm", "mountPath": "/dev/shm"} in container["volumeMounts"]
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        environ[container["name"]] = {each["name"]: each["value"] for each in container["env"]}
    assert spec["volumes"][0]["emptyDir"]["medium"] == "Memory"
    engine, agent = environ["engine"], environ["tracekv-agent"]
    assert settings.load(engine).agent == "external"
    assert settings.load_section("fsspec", FsspecSettings, engine).arena_bytes == 32 << 30
    assert settings.load(engine).journal_dir == settings.load(agent).journal_dir


def test_the_settings_file_of_the_page_is_a_settings_file(tmp_path):
    (text,) = of_language("docs/settings.md", "yaml")
    path = tmp_path / "tracekv.yaml"
    path.write_text(text, encoding="utf-8")
    environ = {"TRACEKV_CONFIG": str(path)}
    assert settings.load(environ).detail == "full"
    assert settings.load_section("fsspec", FsspecSettings, environ).url == "s3://bucket/prefix"


@pytest.mark.parametrize("page", ["docs/wrap.md"])
def test_python_blocks_run(page):
    blocks = of_language(page, "python")
    assert blocks
    for text in blocks:
        exec(compile(text, page, "exec"), {"__name__": page})


def test_every_variable_that_a_page_names_is_a_setting():
    known = set(VARIABLE.findall((ROOT / "docs" / "settings.md").read_text(encoding="utf-8"))) | MADE_UP
    named = {}
    for page in PAGES:
        for name in VARIABLE.findall((ROOT / page).read_text(encoding="utf-8")):
            named.setdefault(name, page)
    assert {name: page for name, page in named.items() if name not in known and not name.endswith("_")} == {}
    assert len(named) > 20


def test_a_block_of_another_language_is_no_command():
    assert [block.looks_like_shell for block in blocks_of("```python\npip = 1\n```\n```\npip install x\n```\n")] == [
        False,
        True,
    ]
