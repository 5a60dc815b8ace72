"""The tables of README.md and the tests agree."""

import re
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent.parent


def section(title: str) -> list[list[str]]:
    """The cells of one section's table."""
    text = (HERE / "README.md").read_text()
    body = text.split(f"## {title}\n")[1].split("\n## ")[0]
    rows = [line.strip("|\n ").split(" | ") for line in body.splitlines() if line[:1] == "|"]
    return [[cell.strip().strip("`") for cell in row] for row in rows[2:]]


def spans(text: str) -> set[int]:
    """'1-3 7' gives 1, 2, 3 and 7."""
    found: set[int] = set()
    for part in text.split():
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return found


def names_in(path: Path) -> list[str]:
    return re.findall(r"^def test_(\w+)", path.read_text(), re.MULTILINE)


def listed_here() -> dict[str, set[str]]:
    listed: dict[str, set[str]] = {}
    for letter, _, file, ids in section("Here"):
        listed.setdefault(file, set()).update(f"{letter}{n}" for n in spans(ids))
    return listed


def listed_elsewhere() -> list[list[str]]:
    return section("In other files") + section("Where fsdp_c does better than torch")


def listed_without_test() -> list[list[str]]:
    titles = (
        "Where fsdp_c differs by design",
        "Needs an accelerator",
        "Defects of torch",
        "No behaviour",
    )
    return [row for title in titles for row in section(title)]


def ids_of(cell: str) -> list[str]:
    """'E1', or several of one letter: 'E 1-3 7'."""
    letter, _, numbers = cell.partition(" ")
    return [f"{letter}{n}" for n in sorted(spans(numbers))] if numbers else [letter]


def all_listed() -> list[str]:
    ids = [id for found in listed_here().values() for id in found]
    return ids + [
        id for cell, *_ in listed_elsewhere() + listed_without_test() for id in ids_of(cell)
    ]


def test_ids_are_those_of_the_tests() -> None:
    for file, ids in listed_here().items():
        found = set()
        for name in names_in(HERE / file):
            leading = re.match(r"(?:[a-z]+\d+_)+", name)
            assert leading, f"test_{name} in {file} has no id"
            found |= set(leading[0].upper().strip("_").split("_"))
        assert found == ids, file


def test_other_tests_exist() -> None:
    for id, _, place in listed_elsewhere():
        file, _, name = place.partition("::")
        functions = re.findall(r"^def (\w+)", (ROOT / file).read_text(), re.MULTILINE)
        assert name in functions, f"{id}: {place}"


def test_every_id_has_one_place() -> None:
    listed = all_listed()
    assert len(listed) == len(set(listed)), sorted({id for id in listed if listed.count(id) > 1})
    known = {id for line in (HERE / "ids.txt").read_text().splitlines() for id in ids_of(line)}
    assert set(listed) == known, sorted(set(listed) ^ known)


def test_defects_are_those_of_listed_behaviours() -> None:
    """The rows DF only gather what other rows say."""
    listed = set(all_listed())
    for cell, rows, _ in section("Defects of torch"):
        assert set(rows.split()) <= listed, cell
