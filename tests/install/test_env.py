"""Environment variables: read when asked, checked, and all in the table of docs/settings.md."""

import re
from pathlib import Path

import pytest

from fsdp_c import _env

ROOT = Path(__file__).resolve().parents[2]
ROW = re.compile(r"^\| `(FSDP_C_\w+)` \| ([^|]*) \| ([^|]*) \| ([^|]*) \|$", re.MULTILINE)
BY_NAME = {variable.name: variable for variable in _env.VARIABLES}


def shown(default: object) -> str:
    text = ",".join(default) if isinstance(default, tuple) else default
    text = "" if text is None else text
    return str(int(text) if isinstance(text, bool) else text) or "empty"


def test_docs_list_every_variable():
    section = (ROOT / "docs/settings.md").read_text().split("## Environment variables", 1)[1]
    rows = ROW.findall(section.split("\n## ", 1)[0])
    expected = [(v.name, v.accepted, shown(v.default), v.meaning) for v in _env.VARIABLES]
    assert rows == expected


def test_table_holds_every_variable_of_the_module():
    declared = [v for v in vars(_env).values() if isinstance(v, _env.Variable)]
    assert declared == list(_env.VARIABLES)


@pytest.mark.parametrize("name", BY_NAME)
def test_unset_and_empty_mean_the_default(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(name, raising=False)
    assert BY_NAME[name].get() == BY_NAME[name].default
    monkeypatch.setenv(name, " ")
    assert BY_NAME[name].get() == BY_NAME[name].default


def test_value_is_read_at_each_call(monkeypatch: pytest.MonkeyPatch):
    for text, value in (("SHM", "shm"), ("callback", "callback")):
        monkeypatch.setenv("FSDP_C_TRANSPORT", text)
        assert _env.TRANSPORT.get() == value
    for text in ("0", "4096"):
        monkeypatch.setenv("FSDP_C_MMAP_THRESHOLD", text)
        assert _env.MMAP_THRESHOLD.get() == int(text)
    for text, strict in (("1", True), ("0", False)):
        monkeypatch.setenv("FSDP_C_STRICT", text)
        assert _env.is_strict() is strict
    for text, devices in (("cuda", ("cuda",)), ("CPU, cuda", ("cpu", "cuda"))):
        monkeypatch.setenv("FSDP_C_DEVICES", text)
        assert _env.DEVICES.get() == devices


@pytest.mark.parametrize("name", BY_NAME)
def test_wrong_value_is_named(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(name, "nonsense")
    with pytest.raises(ValueError, match=f"{name}='nonsense': expected {BY_NAME[name].accepted}"):
        BY_NAME[name].get()
