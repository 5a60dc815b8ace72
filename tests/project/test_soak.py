"""The campaign itself, in a minute: it finds what is planted, says how to see it again, goes on."""

import dataclasses
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests"
sys.path[:0] = [str(TESTS), str(ROOT / "benchmarks")]

from soak import cli, failing, families, kills, programs  # noqa: E402
from soak.case import LEFT_OUT, Family, Verdict, failed  # noqa: E402


def run(tmp_path: Path, *arguments: str, of: list[Family] | None = None) -> int:
    where = ["--state", str(tmp_path / "state.json"), "--results", str(tmp_path)]
    return cli.main([*arguments, *where], families.ALL if of is None else of)


def report_in(tmp_path: Path) -> tuple[dict, str]:
    text = next(tmp_path.glob("soak_*.md")).read_text()
    return json.loads(next(tmp_path.glob("soak_*.json")).read_text()), text


# ---- the loop and the report ----


def counting(ran: list[str], bad: str = "") -> Family:
    def cases(seed: int) -> Iterator[str]:
        yield from (f"{seed}/{number}" for number in range(6))

    def run_one(key: str) -> Verdict:
        ran.append(key)
        if key == bad:
            return failed("it is bad")
        return Verdict(LEFT_OUT, "no such thing here") if key.endswith("/4") else Verdict(n=10)

    return Family("counting", "that it counts", cases, run_one, unit="things")


def test_a_run_that_was_cut_off_goes_on(tmp_path: Path) -> None:
    ran: list[str] = []
    family = counting(ran)
    assert run(tmp_path, "--count", "2", of=[family]) == 0
    assert run(tmp_path, "--count", "4", "--resume", of=[family]) == 0
    assert ran == ["0/0", "0/1", "0/2", "0/3"]
    assert run(tmp_path, "--seeds", "0:2", "--resume", of=[family]) == 0
    assert len(ran) == len(set(ran)) == 12
    facts, text = report_in(tmp_path)
    assert facts["rows"][0]["trials"] == 100 and facts["seeds"] == "0:2"
    assert "| 100 things | 0 | 2 |" in text and "2 not run: no such thing here" in text
    assert run(tmp_path, "--count", "1", of=[family]) == 0 and ran[-1] == "0/0"  # anew


def test_failures_are_reported_with_their_command(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    family = counting([], bad="0/3")
    assert run(tmp_path, of=[family]) == 1
    facts, text = report_in(tmp_path)
    command = "python -m tests.soak --case 'counting/0/3'"
    assert [failure["reproduce"] for failure in facts["failures"]] == [command]
    assert command in text and command in capsys.readouterr().out
    assert run(tmp_path, *shlex.split(command)[3:], of=[family]) == 1
    assert "it is bad" in capsys.readouterr().out


def test_families_have_names_of_their_own() -> None:
    names = [family.name for family in families.ALL]
    assert len(names) == len(set(names))
    with pytest.raises(SystemExit):
        cli.parsed(["--only", "nothing"], names)


# ---- families ----


@pytest.mark.usefixtures("quick_scripts")
def test_a_planted_mistake_is_found_by_programs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(programs, "BATCH", 3)
    monkeypatch.setattr(programs, "WAYS", {"shared memory": ([], {}, [2])})
    family = dataclasses.replace(
        programs.FAMILY, run=lambda key: programs.run(key, fault="dropped_division")
    )
    assert run(tmp_path, "--count", "1", of=[family]) == 1
    (failure,) = report_in(tmp_path)[0]["failures"]
    found = re.fullmatch(
        r"python -m (tests.differential --seeds \d+ .*)", failure["reproduce"].strip()
    )
    assert found, failure
    again = [sys.executable, "-m", *found[1].split()]
    assert subprocess.run(again, cwd=ROOT, capture_output=True, timeout=120).returncode == 1


def test_kills_and_failing_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kills, "WAYS", {"shared memory": kills.Way(((2,),))})
    assert run(tmp_path, "--only", "kills,calls", "--count", "2") == 0
    rows = {row["family"]: row for row in report_in(tmp_path)[0]["rows"]}
    assert rows["kills"]["trials"] == rows["calls"]["trials"] == 2
    assert re.fullmatch(r"\d\d states of ranks", rows["kills"]["whole"]), rows


def test_a_rank_that_was_not_killed_is_a_failure() -> None:
    with kills.prepared():
        verdict = kills.run("shared memory/2/1/fc_domain_open>/1000")
        assert verdict.fate == "failed" and "was not killed there" in verdict.text
        counts = failing.undisturbed(2)[0][2]
        assert all(counts[call] > 0 for call in failing.CALLS if call != "pidfd_open"), counts
