"""The site is built with every warning an error, and what was built needs nobody else."""

from __future__ import annotations

import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"\]\(([^)\s]+)\)")


def build(into: Path, config: Path = ROOT / "mkdocs.yml") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", config, "-d", into]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=240)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    done = build(folder)
    assert done.returncode == 0, done.stderr
    return folder


class Loaded(HTMLParser):
    """Addresses that a browser fetches by itself when it opens a page, and the code blocks that it shows."""

    def __init__(self) -> None:
        super().__init__()
        self.urls: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag, attributes):
        told = dict(attributes)
        if tag in ("script", "img", "iframe", "source"):
            self.urls += [told["src"]] if told.get("src") else []
        elif tag == "link" and told.get("rel") in ("stylesheet", "preload", "preconnect", "dns-prefetch", "icon"):
            self.urls.append(told["href"])

    def handle_data(self, data):
        self.text.append(data)


def pages(site):
    found = sorted(site.rglob("*.html"))
    assert len(found) > 30
    return found


def test_no_page_loads_anything_from_elsewhere(site):
    for page in pages(site):
        loaded = Loaded()
        loaded.feed(page.read_text(encoding="utf-8"))
        assert loaded.urls
        assert [url for url in loaded.urls if "//" in url] == [], page
    for style in site.rglob("*.css"):
        assert not re.search(r"(@import|url\()\s*['\"]?(https?:)?//", style.read_text(encoding="utf-8")), style


def test_every_page_of_the_repository_is_on_the_site(site):
    expected = {path.relative_to(ROOT / "docs").with_suffix(".html") for path in (ROOT / "docs").rglob("*.md")}
    assert expected <= {path.relative_to(site) for path in pages(site)}


def test_no_fence_and_no_include_is_left_as_text(site):
    for page in pages(site):
        loaded = Loaded()
        loaded.feed(page.read_text(encoding="utf-8"))
        text = "".join(loaded.text)
        assert "```" not in text, page
        assert "--8<--" not in text, page
    assert "Imports point downwards only" in (site / "extend.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("wrong", ["[x](nowhere.md)", "[x](cli.md#nothing)", '--8<-- "nowhere.md"'])
def test_a_dead_link_ends_the_build(tmp_path, wrong):
    """The negative control of the strict build."""
    (tmp_path / "docs").mkdir()
    for name in ("cli.md", "site.css"):
        (tmp_path / "docs" / name).write_text((ROOT / "docs" / name).read_text(encoding="utf-8"), encoding="utf-8")
    (tmp_path / "docs" / "index.md").write_text(f"# Start\n\n{wrong}\n", encoding="utf-8")
    config = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[0]
    config = config.replace("tools/docs_site.py", str(ROOT / "tools" / "docs_site.py"))
    (tmp_path / "mkdocs.yml").write_text(config, encoding="utf-8")
    assert build(tmp_path / "site", tmp_path / "mkdocs.yml").returncode != 0


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "examples/README.md"])
def test_what_a_page_beside_the_site_links_to_exists(page):
    links = [link for link in LINK.findall((ROOT / page).read_text(encoding="utf-8")) if "//" not in link]
    assert [link for link in links if not (ROOT / page).parent.joinpath(link.partition("#")[0]).exists()] == []
