"""Random programs under torch's fully_shard and fsdp_c's; mistakes that this must notice."""

import dataclasses

import harness
import pytest
import torch
from differential import cli, execute, faults, features, shrink
from differential.generate import make_program
from differential.program import WORLDS, Program

# Under the torch that development uses; another one gets a tenth.
N_SEEDS = 50
CHUNK = 25
# Of programs with rare features, by the number of ranks.
FEATURE_SEEDS = {2: range(743, 752), 4: range(404, 415)}


def n_seeds() -> int:
    return N_SEEDS if torch.__version__.startswith("2.13.") else N_SEEDS // 10


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "chunk" not in metafunc.fixturenames:
        return
    first = metafunc.config.getoption("--first-seed")
    n = metafunc.config.getoption("--seeds")
    seeds = range(first, first + (n_seeds() if n is None else n))
    chunks = [
        (world, mine[start : start + CHUNK])
        for world, mine in sorted(cli.by_world(seeds).items())
        for start in range(0, len(mine), CHUNK)
    ]
    ids = [f"{world}-ranks-from-{seeds[0]}" for world, seeds in chunks]
    metafunc.parametrize("chunk", chunks, ids=ids)


def test_same_as_torch(chunk: tuple[int, list[int]]) -> None:
    world, seeds = chunk
    check(cli.run(seeds, world), seeds, world)


def check(result: cli.Result, seeds: list[int], world: int, kind: str = "") -> None:
    if result.failures:
        seed, failure = next(iter(result.failures.items()))
        text = shrink.explain(seed, world, kind=kind)
        text = text or f"not seen again when seed {seed} ran alone"
        pytest.fail(f"seeds {sorted(result.failures)} fail\n{failure}\n{text}", pytrace=False)
    # Most programs run to their end.
    assert sum(result.ends.values()) <= 0.2 * len(seeds) + 2, result.ends


@pytest.mark.parametrize("n_ranks", list(FEATURE_SEEDS))
def test_features_same_as_torch(n_ranks: int) -> None:
    """Every feature that the installed torch has, on two and on four ranks."""
    seeds = list(FEATURE_SEEDS[n_ranks])
    result = cli.run(seeds, n_ranks, kind="features")
    check(result, seeds, n_ranks, "features")
    lacking = features.missing() | ({"int"} if n_ranks != 4 else set())
    assert {name for name, _ in result.features} == set(features.NAMES) - lacking


@pytest.mark.parametrize("fault", [*faults.PATCHES, *faults.TAMPERS])
def test_planted_mistake_is_found(fault: str) -> None:
    if harness.implementation().__name__ != "fsdp_c":
        pytest.skip("mistakes are planted into fsdp_c")
    world = 2
    result = cli.run(list(range(1100, 1160)), world, fault, chunk=20)
    assert result.failures, f"{fault} was not noticed"


def test_small_script_for_a_failure() -> None:
    """The program shrinks to what the mistake needs, and the script can be compiled."""

    def fails(candidate: Program) -> execute.Failure | None:
        return shrink.fails(candidate, "stale_shard")

    programs = (make_program(seed, 2) for seed in range(1000, 1020))
    program, failure = next((p, failure) for p in programs if (failure := fails(p)) is not None)
    assert failure.kind == "differs"
    small, failure = shrink.shrink(program, failure, fails, n_tries=30)
    assert len(small.lines) < len(program.lines)
    counted = shrink.script(dataclasses.replace(small, counted=True), failure)
    text = shrink.script(small, failure)
    assert "Counting()" in counted and "Counting()" not in text
    compile(counted, "script", "exec")
    compile(text, "script", "exec")
    assert "optimizer.step()" in text and "torchrun --nproc_per_node 2" in text


def test_hanging_ranks_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shrink, "CASE_TIMEOUT_S", 1)
    program = Program(77, 2, ["x = 1", "torch.distributed.barrier() if rank == 0 else None"])
    program.blocks = [["import os\nos.read(os.pipe()[0], 1)"]]
    failure = shrink.fails(program)
    assert failure is not None and failure.kind == "hangs"
    assert failure.line.startswith("seed 77, line "), failure


def test_an_exception_of_one_side_is_a_failure() -> None:
    line = "1 / (fsdp.__name__ == 'torch.distributed.fsdp')"
    failure = shrink.fails(Program(1, 1, [line]))
    assert failure is not None and failure.kind == "only fsdp_c raises" and failure.line == line


def test_programs_depend_on_their_seed_alone() -> None:
    for seed in range(50):
        world = WORLDS[seed % len(WORLDS)]
        assert make_program(seed) == make_program(seed, world)
        assert make_program(seed).lines != make_program(seed + 1).lines


def test_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(cli.parse_seeds("3:6")) == [3, 4, 5]
    assert list(cli.parse_seeds("3")) == [3]
    monkey = pytest.MonkeyPatch()
    monkey.setattr(harness, "stop", lambda: None)
    with monkey.context():
        assert cli.main(["--seeds", "2:4", "--ranks", "1"]) == 0
    assert "2 seeds, " in capsys.readouterr().out
