"""Mutants are changes of code, and of nothing else."""

from pathlib import Path

from mutate.cli import ROOT, equivalents
from mutate.mutants import mutants_of

SOURCE = """
static int limit = 1;

static int f(const thing *t, size_t n)
{
    const char *text = "a < b && c"; /* n - 1 */
    for (size_t i = 0; i < n; i++) {
        if (t->a == i && !t->is_there) {
            FC_TRY(look(t, i));
        }
    }
    (void)note(t);
    return n > 1 ? 0 : -1;
}
"""


def test_what_is_changed() -> None:
    found = [(m.number, m.after.strip()) for m in mutants_of("f.c", SOURCE)]
    assert (7, "for (size_t i = 0; i <= n; i++) {") in found
    assert (7, "for (size_t i = 1; i < n; i++) {") in found
    assert (7, "for (size_t i = 0; i < n; i--) {") in found
    assert (8, "if (t->a != i && !t->is_there) {") in found
    assert (8, "if (t->a == i || !t->is_there) {") in found
    assert (8, "if (t->a == i && t->is_there) {") in found
    assert (9, "(void)(look(t, i));") in found
    assert (12, ";") in found
    assert (13, "return n >= 1 ? 0 : -1;") in found
    assert {number for number, _ in found} == {7, 8, 9, 12, 13}


def test_equivalent_ones_are_mutants() -> None:
    files = {key.split(" ")[0] for key in equivalents()}
    keys = {m.key for file in files for m in mutants_of(file, Path(ROOT, file).read_text())}
    assert equivalents() <= keys
