"""docs/estimates.md says what its commands say."""

import re
import runpy
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"
# Another torch may do a step in other operations.
TOLERANCE = 0.02
_NUMBER = re.compile(r"\d[\d,]*\.?\d*")


def test_outputs_are_those_of_the_commands() -> None:
    script = runpy.run_path(str(DOCS / "make_estimates.py"), run_name="docs")
    blocks = script["blocks"]((DOCS / "estimates.md").read_text())
    assert len(blocks) >= 6
    for arguments, shown in blocks:
        now = script["output_of"](arguments)
        assert _NUMBER.sub("#", now).split() == _NUMBER.sub("#", shown).split(), arguments
        for a, b in zip(_NUMBER.findall(now), _NUMBER.findall(shown), strict=True):
            mine, written = (float(text.replace(",", "")) for text in (a, b))
            assert mine == pytest.approx(written, rel=TOLERANCE, abs=0.02), arguments


def test_the_picture_has_what_the_page_promises() -> None:
    text = (DOCS / "estimates.svg").read_text()
    assert (
        text.count("<polyline") == 6
        and "74.5 GiB: a card of 80 GB" in text
        and "GPT 175B, zero3" in text
    )
    assert "estimates.svg" in (DOCS / "estimates.md").read_text()
