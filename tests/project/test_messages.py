"""docs/troubleshooting.md has every text that the package can show a user, and no other ones."""

import re
from pathlib import Path

import messages
import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/troubleshooting.md"
INTERNAL = Path(__file__).with_name("internal_messages.txt")
ITEM = re.compile(r"^- (`+) ?(.*?) ?\1(?:<br>.*)?$", re.MULTILINE)
# Of two words or one, which are too few to tell text from names.
SHORT = {"…='…': expected …", "rank … (pid …) …"}
# gloo's, which tests/ranks/test_last_error.py makes it say; torch's.
NO_NUMPY = "Failed to initialize NumPy: No module named 'numpy'"
OF_OTHERS = {"Connection closed by peer", "Connection reset by peer", NO_NUMPY}


def listed_on_page() -> list[str]:
    return [text for _, text in ITEM.findall(PAGE.read_text())]


def internal() -> tuple[dict[str, str], dict[str, str]]:
    """Texts, and patterns of files, each with the reason above it."""
    texts, files, reason = {}, {}, ""
    _, *groups = INTERNAL.read_text().split("\n# ")
    for group in groups:
        reason, *lines = group.splitlines()
        for line in filter(None, lines):
            kind, _, pattern = line.partition(" ")
            (files if kind == "file" else texts)[pattern if kind == "file" else line] = reason
    return texts, files


def test_every_message_is_explained_or_internal() -> None:
    on_page = set(listed_on_page())
    texts, files = internal()
    found = messages.all_messages()
    missing = [
        f"{path}: {text}"
        for text, path in found.items()
        if text not in on_page
        and text not in texts
        and not any(Path(path).match(pattern) for pattern in files)
    ]
    assert not missing, (
        "say what causes and what cures them in docs/troubleshooting.md, or why nobody looks for"
        " them in tests/project/internal_messages.txt:\n" + "\n".join(missing)
    )


def test_nothing_is_listed_that_is_not_shown() -> None:
    found = messages.all_messages()
    texts, files = internal()
    known = {*found, *SHORT, *OF_OTHERS}
    gone = [text for text in [*listed_on_page(), *texts] if text not in known]
    assert not gone, "no source has these any more:\n" + "\n".join(gone)
    for pattern in files:
        assert any(Path(path).match(pattern) for path in found.values()), pattern


def test_torch_warns_so_of_numpy() -> None:
    begins, _, _ = NO_NUMPY.partition(":")
    library = Path(torch.__file__).parent / "lib/libtorch_python.so"
    assert begins.encode() in library.read_bytes()
    assert NO_NUMPY in (ROOT / "docs/getting_started.md").read_text()


def test_lists_have_no_doubles_and_reasons() -> None:
    listed = listed_on_page()
    texts, files = internal()
    assert len(listed) == len(set(listed)) and not set(listed) & set(texts)
    assert all(len(reason.split()) >= 3 for reason in (*texts.values(), *files.values()))


def test_every_section_says_cause_and_cure() -> None:
    sections = PAGE.read_text().split("\n## ")[1:]
    assert len(sections) > 20
    for section in sections:
        title = section.partition("\n")[0]
        assert "**Cause.** " in section and "**Cure.** " in section, title
        assert ITEM.search(section), title


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ('fc_fail(FC_ERR_STATE, "rank %d of %zu" " is gone", a, b);', "rank … of … is gone"),
        ('fail("a wait of %" PRIu64 " s is over");', "a wait of … s is over"),
        ('say("it is // not a comment"); /* "nor is this one here" */', "it is // not a comment"),
        ('static_assert(sizeof(a) == 4, "read by other processes");', None),
        ('say("two words");', None),
    ],
)
def test_texts_of_c_are_found(code: str, text: str | None, tmp_path: Path) -> None:
    path = tmp_path / "some.c"
    path.write_text(f'#include "base/a header of ours.h"\n{code}\n')
    assert list(messages.of_c(path)) == ([] if text is None else [text])


@pytest.mark.parametrize(
    ("code", "texts"),
    [
        ('raise ValueError(f"unit {name!r} is" " not here")', ["unit … is not here"]),
        ('warnings.warn("all of it is lost", stacklevel=2)', ["all of it is lost"]),
        ('text = "it is made before"\n    raise error(text)', ["it is made before"]),
        ("raise ValueError(f\"there: {'one of them or' if a else b}\")", ["one of them or"]),
        ('use("no message is this one")', []),
    ],
)
def test_texts_of_python_are_found(code: str, texts: list[str], tmp_path: Path) -> None:
    path = tmp_path / "some.py"
    path.write_text(f'def f():\n    """A docstring of three words."""\n    {code}\n')
    assert list(messages.of_python(path)) == texts
