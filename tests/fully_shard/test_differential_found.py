"""Short programs that once ran otherwise under fsdp_c than under torch; each named by its cause."""

import harness
import pytest
from differential import execute
from differential.program import Program

SHARDS = "shards = dict(model.named_parameters())"
FOUND = {
    # The hook after forward runs then too, with None: taken for an output that hides tensors.
    "the last member of a grouped unit raises": Program(
        0,
        1,
        [
            "model = Net(3, 'block linear')",
            "model.layers[1] = nn.Linear(4, 4)",
            "fsdp.fully_shard([model.layers[0], model.layers[1]])",
            "fsdp.fully_shard(model)",
            SHARDS,
        ],
        [["what = attempt(lambda: model(data(rank, 1, 2, 3)))"]],
    ),
    # From torch 2.15 on the end of a backward posts what the replicas have not seen: here again,
    # while the post that carries it waited for a peer.
    "gradient hooks after partial sums of replicas": Program(
        0,
        2,
        [
            "model = Net(3, 'block')",
            "fsdp.fully_shard(model.layers[0], mesh=cached_mesh((1, 2), ('r', 's')))",
            "fsdp.fully_shard(model)",
            SHARDS,
            "log = []",
            "log_gradients(shards, log)",
        ],
        [
            [
                "model.set_requires_all_reduce(False)",
                "loss = backward(model(data(rank, 1, 2, 3)))",
                "model.set_requires_all_reduce(True)",
                "loss = backward(model(data(rank, 2, 2, 3)))",
                "hooked = sorted(log, key=str)",
            ]
        ],
    ),
    # A member that is computed again got a hook of its own, whose backward closed the unit to the
    # members before it: their gradients were lost.
    "a grouped unit in reentrant checkpoints": Program(
        0,
        2,
        [
            "model = Net(3, 'linear norm linear', around='reentrant')",
            "fsdp.fully_shard(list(model.layers))",
            "fsdp.fully_shard(model)",
            SHARDS,
        ],
        [["loss = backward(model(data(rank, 1, 2, 3)))"]],
    ),
    # What hooks and custom reduce-scatters are given had zeros in the places of the others.
    "an all-reduce hook where some parameters have no gradient": Program(
        0,
        2,
        [
            "model = Net(3, 'thin thin linear dict')",
            "fsdp.fully_shard(model)",
            "noted = []",
            "model.set_all_reduce_hook(reduce_hook(noted, 0.5))",
            SHARDS,
        ],
        [
            ["loss = backward(model(data(rank, 1, 2, 3), use=(1, 3)))", "calls = sorted(noted)"],
            ["loss = backward(model(data(rank, 2, 2, 3), use=(0, 2)))", "calls = sorted(noted)"],
            ["loss = backward(model(data(rank, 3, 2, 3)))", "calls = sorted(noted)"],
        ],
        features=("all-reduce hook",),
    ),
    "a custom reduce-scatter and replicas where some parameters have no gradient": Program(
        0,
        2,
        [
            "model = Net(3, 'thin linear dict')",
            "fsdp.fully_shard(model, mesh=cached_mesh((1, 2), ('r', 's')))",
            "noted = []",
            "model.set_custom_reduce_scatter(ReduceScatter(noted))",
            "model.set_all_reduce_hook(reduce_hook(noted, 0.5))",
            SHARDS,
        ],
        [
            ["loss = backward(model(data(rank, 1, 2, 3), use=(2,)))", "calls = sorted(noted)"],
            ["loss = backward(model(data(rank, 2, 2, 3), use=(0, 1)))", "calls = sorted(noted)"],
        ],
        features=("all-reduce hook",),
    ),
    # Units that nobody looks at were not in the order of forwards: the last unit of a forward that
    # had no backward stood before the first one of the next, and was gathered behind it.
    "custom all-gathers of some units and a forward without a backward": Program(
        0,
        2,
        [
            "model = Net(4, 'norm linear linear')",
            *(f"fsdp.fully_shard(model.layers[{i}])" for i in (1, 2)),
            "fsdp.fully_shard(model)",
            "noted = []",
            *(f"model.layers[{i}].set_custom_all_gather(AllGather(noted))" for i in (1, 2)),
            SHARDS,
        ],
        [
            ["out = model(data(rank, 1, 3, 4))"],
            [
                "out = model(data(rank, 2, 4, 4), use=(1, 2))",
                "loss = backward(out)",
                "calls = list(noted)",
            ],
        ],
        features=("custom all-gather",),
    ),
    # What was held came along with the sum after the unit's last pass.
    "gradients held for a layer that runs twice go ahead": Program(
        0,
        2,
        [
            "model = Net(4, 'linear again')",
            "fsdp.fully_shard(model.layers[0])",
            "fsdp.fully_shard(model)",
            SHARDS,
        ],
        [
            ["model.layers[0].set_requires_gradient_sync(False)"],
            ["loss = backward(model(data(rank, 1, 3, 4)))"],
            ["loss = backward(model(data(rank, 2, 3, 4)))"],
            ["model.layers[0].set_requires_gradient_sync(True)"],
            ["loss = backward(model(data(rank, 3, 3, 4)))"],
        ],
        counted=True,
    ),
}


@pytest.mark.parametrize("cause", FOUND)
def test_found(cause: str) -> None:
    program = FOUND[cause]
    reports = harness.run_ranks(execute.run_programs, program.world, [program], timeout=30)
    assert not [report.failures for report in reports if report.failures]
    assert reports[0].n_lines == len(program.lines), reports[0].ends
