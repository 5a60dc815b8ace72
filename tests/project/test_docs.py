"""README and docs/: links lead somewhere, commands exist, chart and lists are up to date."""

import ast
import inspect
import re
import runpy
import textwrap
from pathlib import Path

import pytest

import fsdp_c

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))
RECORDS = sorted((DOCS / "decisions").glob("*"))
READ = [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "examples/README.md", *PAGES]
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
README_LINES = 120  # who wants to know more finds it in docs/


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def anchors_of(page: Path) -> set[str]:
    heads = re.findall(r"^#+ (.*)$", FENCE.sub("", page.read_text()), re.MULTILINE)
    words = [re.sub(r"[^\w\- ]", "", head.lower()) for head in heads]
    return {re.sub(r"[ ]+", "-", word.strip()) for word in words}


@pytest.mark.parametrize("page", [*READ, ROOT / "CONTRIBUTING.md"], ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    for target in LINK.findall(FENCE.sub("", page.read_text())):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        found = (page.parent / path) if path else page
        assert found.is_file(), f"{target} is not there"
        assert not anchor or anchor in anchors_of(found), f"{target}: no such heading"


def test_every_page_is_in_the_navigation() -> None:
    listed = re.findall(r": (\w+\.md)$", (DOCS / "site/mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(page.name for page in PAGES)


def test_readme_is_short_and_leads_to_the_pages() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= README_LINES
    linked = {target.partition("#")[0] for target in LINK.findall(text)}
    unlinked = {page.name for page in PAGES if f"docs/{page.name}" not in linked}
    assert unlinked == {"index.md", "changelog.md"}  # these show what README and CHANGELOG have


@pytest.mark.parametrize("page", [*READ, ROOT / "CONTRIBUTING.md", *RECORDS], ids=name_of)
def test_commands_exist(page: Path) -> None:
    """Targets of make and files of the tree that a page tells its reader to run or to look at."""
    text = page.read_text()
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    in_fences = "\n".join(FENCE.findall(text))
    told = re.findall(r"^make ([a-z-]+)", in_fences, re.MULTILINE)
    told += re.findall(r"`(?:[A-Z_]+=\S+ )*make ([a-z-]+)", text)
    assert set(told) <= set(targets)
    for path in re.findall(r"`((?:examples|benchmarks|tests|docs|csrc|fsdp_c)/[\w./-]+)`", text):
        assert (ROOT / path).exists(), path


def test_chart_is_drawn_from_the_results() -> None:
    script = runpy.run_path(str(DOCS / "make_chart.py"), run_name="docs")
    drawn = (DOCS / "chart.svg").read_text()
    assert drawn == script["picture"](), "make chart"
    assert drawn.count("<rect") == 1 + 3 + 6 + 8 + 6  # ground, legend, three panels


def test_api_has_every_public_name() -> None:
    text = (DOCS / "api.md").read_text()
    described = set(re.findall(r"^::: fsdp_c\.(\w+)$", text, re.MULTILINE))
    torchs = text.partition("## torch's own")[2].partition("```")[0]
    of_torch = set(re.findall(r"`(\w+)`", torchs))
    public = set(fsdp_c.__all__) - {"STRATEGIES"}  # a table of Strategy
    assert public <= described | of_torch
    assert described <= public and not described & of_torch
    for name in of_torch & public:
        assert getattr(fsdp_c, name).__module__.startswith("torch."), name


def shown_of(name: str) -> list[str]:
    """What the site shows of a public name's signatures and fields: annotations and defaults."""
    (thing,) = ast.parse(textwrap.dedent(inspect.getsource(getattr(fsdp_c, name)))).body
    functions = [thing] if isinstance(thing, ast.FunctionDef) else []
    shown: list[ast.AST | None] = []
    for node in thing.body if isinstance(thing, ast.ClassDef) else []:
        if isinstance(node, ast.FunctionDef) and not re.match("_(?!_init__)", node.name):
            functions.append(node)
        elif isinstance(node, ast.AnnAssign) and not ast.unparse(node.target).startswith("_"):
            shown += [node.annotation, node.value]
    for function in functions:
        shown += [function.returns, *function.args.defaults, *function.args.kw_defaults]
        shown += [arg.annotation for arg in ast.walk(function.args) if isinstance(arg, ast.arg)]
    return [ast.unparse(node) for node in shown if node is not None]


def test_no_public_signature_shows_a_private_name() -> None:
    """As mkdocstrings prints it, from the source, and as `help()` does, from the function."""
    private = re.compile(r"(?<![\w/])_[A-Za-z]\w*| at 0x")
    described = re.findall(r"^::: fsdp_c\.(\w+)$", (DOCS / "api.md").read_text(), re.MULTILINE)
    for name in described:
        thing = getattr(fsdp_c, name)
        methods = {k: v for k, v in vars(thing).items() if inspect.isfunction(v) and k[0] != "_"}
        signatures = [str(inspect.signature(one)) for one in (thing, *methods.values())]
        for text in [*shown_of(name), *signatures]:
            assert not private.search(text), f"{name}: {text}"


def test_records_of_decisions_are_numbered_dated_and_listed() -> None:
    lines = re.findall(
        r"^- \[(\d{4})\]\(docs/decisions/([\w-]+\.md)\) (.*)$",
        (ROOT / "CONTRIBUTING.md").read_text(),
        re.MULTILINE,
    )
    assert sorted(name for _, name, _ in lines) == [record.name for record in RECORDS]
    assert sorted(int(number) for number, _, _ in lines) == list(range(1, len(RECORDS) + 1))
    dates = []
    for number, name, title in sorted(lines):
        text = (DOCS / "decisions" / name).read_text()
        found = re.match(rf"# {re.escape(title)}\n\nDecided (\d{{4}}-\d\d-\d\d)\.\n", text)
        assert found and name.startswith(number), name
        dates.append(found[1])
    assert dates == sorted(dates), "the next number is the later one"


def test_host_calls_the_same_script() -> None:
    workflow = (ROOT / ".github/workflows/ci.yml").read_text()
    assert re.findall(r"^ *- run: (.*)$", workflow, re.MULTILINE) == [".ci/run"]
    assert (ROOT / ".ci/run").stat().st_mode & 0o111
