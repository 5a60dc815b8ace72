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
    return section("Where fsdp_c differs by design") + section("Needs an accelerator")


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
        if place != "-":
            file, _, name = place.partition("::")
            names = names_in(ROOT / file)
            assert not name or name.removeprefix("test_") in names, f"{id}: {place}"


def test_every_id_has_one_place() -> None:
    ids = [id for found in listed_here().values() for id in found]
    ids += [id for id, *_ in listed_elsewhere() + listed_without_test()]
    assert len(ids) == len(set(ids)), sorted(id for id in ids if ids.count(id) > 1)
    # T counts all that 2.15 changes, and much of that is no behaviour of a model.
    for letter in {id[0] for id in ids if id[1:].isdigit()} - {"T"}:
        numbers = {int(id[1:]) for id in ids if id[0] == letter and id[1:].isdigit()}
        assert numbers == set(range(1, max(numbers) + 1)), letter
