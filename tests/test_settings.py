from __future__ import annotations

from typing import Literal

import msgspec
import pytest

from tracekv import settings
from tracekv.settings import SettingsError


class Sample(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    url: str = "file:///tmp"
    wait_ms: int = 0
    strict: bool = True
    options: dict[str, str] = {}
    mode: Literal["a", "b"] = "a"


def section(**environ):
    return settings.load_section("sample", Sample, {f"TRACEKV_SAMPLE__{k.upper()}": v for k, v in environ.items()})


def test_defaults_hold_without_any_variable():
    loaded = settings.load({})
    assert (loaded.connector, loaded.detail, loaded.agent) == ("fsspec", "economy", "auto")


def test_a_variable_is_converted_to_its_type():
    loaded = section(wait_ms="250", strict="off", options='{"key": "v"}', mode="b", url="s3://bucket/x")
    assert loaded == Sample(url="s3://bucket/x", wait_ms=250, strict=False, options={"key": "v"}, mode="b")


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({"TRACEKV_DETALE": "full"}, "TRACEKV_DETALE.*Did you mean TRACEKV_DETAIL"),
        ({"TRACEKV_FSSPEC__ULR": "x"}, "TRACEKV_FSSPEC__ULR.*Did you mean TRACEKV_FSSPEC__URL"),
        ({"TRACEKV_FSPEC__URL": "x"}, "TRACEKV_FSPEC__URL.*Did you mean TRACEKV_FSSPEC__URL"),
        ({"TRACEKV_DETAIL": "everything"}, "TRACEKV_DETAIL has no valid value"),
    ],
)
def test_a_wrong_variable_is_named_with_the_nearest_valid_one(environ, said):
    with pytest.raises(SettingsError, match=said):
        settings.load(environ)


def test_a_wrong_number_names_its_setting():
    with pytest.raises(SettingsError, match="TRACEKV_SAMPLE__WAIT_MS has no valid value"):
        section(wait_ms="soon")


def test_a_file_gives_the_same_tree_and_variables_win(tmp_path):
    path = tmp_path / "tracekv.yaml"
    path.write_text("detail: full\nsample:\n  wait_ms: 7\n  mode: b\n")
    environ = {"TRACEKV_CONFIG": str(path), "TRACEKV_SAMPLE__WAIT_MS": "9"}
    assert settings.load_section("sample", Sample, environ) == Sample(wait_ms=9, mode="b")


def test_an_unknown_key_of_the_file_is_named(tmp_path):
    path = tmp_path / "tracekv.yaml"
    path.write_text("detial: full\n")
    with pytest.raises(SettingsError, match="Did you mean TRACEKV_DETAIL"):
        settings.load({"TRACEKV_CONFIG": str(path)})


def test_a_journal_directory_is_the_same_for_every_process(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert settings.load({"TRACEKV_JOURNAL_DIR": "here"}).journal_dir == str(tmp_path / "here")
    assert settings.load({"TRACEKV_JOURNAL_DIR": "~/there"}).journal_dir == str(tmp_path / "home/there")


def test_off_in_a_file_is_what_it_is_in_a_variable(tmp_path):
    path = tmp_path / "tracekv.yaml"
    path.write_text("agent: off\ndetail: off\n")
    loaded = settings.load({"TRACEKV_CONFIG": str(path)})
    assert (loaded.agent, loaded.detail) == ("off", "off")
    path.write_text("connector: off\n")
    with pytest.raises(SettingsError, match="TRACEKV_CONNECTOR has no valid value"):
        settings.load({"TRACEKV_CONFIG": str(path)})


def test_a_key_that_is_no_text_is_named(tmp_path):
    path = tmp_path / "tracekv.yaml"
    path.write_text("1: x\n")
    with pytest.raises(SettingsError, match="no setting TRACEKV_1"):
        settings.load({"TRACEKV_CONFIG": str(path)})


@pytest.mark.parametrize(("content", "said"), [("- a\n", "has to hold a mapping"), ("a: [", "no valid YAML")])
def test_a_file_that_is_no_tree_says_so(tmp_path, content, said):
    path = tmp_path / "tracekv.yaml"
    path.write_text(content)
    with pytest.raises(SettingsError, match=said):
        settings.load({"TRACEKV_CONFIG": str(path)})


def test_a_missing_file_says_so(tmp_path):
    with pytest.raises(SettingsError, match="TRACEKV_CONFIG=.*can't be read: No such file"):
        settings.load({"TRACEKV_CONFIG": str(tmp_path / "none.yaml")})
