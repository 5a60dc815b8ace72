"""docs/when_a_process_dies.md: its commands are those that there are."""

import re
from pathlib import Path

import pytest

from fsdp_c._install import _launch
from fsdp_c._snapshots import _files

PAGE = Path(__file__).resolve().parents[2] / "docs" / "when_a_process_dies.md"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)


def test_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(_files, "MEMORY", tmp_path)
    commands = [line.split("#")[0].split() for block in blocks("") for line in block.splitlines()]
    ours = [command for command in commands if command[:3] == ["python", "-m", "fsdp_c"]]
    assert len(ours) == 2
    for command in ours:
        _launch.main(command[3:])
    assert "there are no snapshots" in capsys.readouterr().out
