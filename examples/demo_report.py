"""Puts training runs side by side: a table of figures, and one picture."""

import statistics
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table
from runlog import Run

WARM_STEPS = 3  # the first steps of a run set things up and are left out of the speed
LOSS_ROWS = 8
SEAM_ROWS = 10
SEAM_WIDTH = 40  # characters of the highest loss
MIB = 2**20
COLOURS = {"fsdp_c": "tab:orange", "torch": "tab:blue"}


class Figures(NamedTuple):
    """What is compared between two runs."""

    tokens_per_s: float
    step_ms: float
    peak_mib: float


def figures(run: Run) -> Figures:
    warm = run.steps[WARM_STEPS:] or run.steps
    return Figures(
        tokens_per_s=sum(s["tokens"] for s in warm) / sum(s["seconds"] for s in warm),
        step_ms=1e3 * statistics.median(s["seconds"] for s in warm),
        peak_mib=max(s["memory_bytes"] for s in run.steps) / MIB,
    )


def loss_difference(a: Run, b: Run) -> float:
    """The largest difference between the losses of one step."""
    return max(abs(s["loss"] - t["loss"]) for s, t in zip(a.steps, b.steps, strict=False))


def agreement(a: Run, b: Run, dtype: str) -> str:
    """Says in words how far the losses of two runs are from each other."""
    apart = loss_difference(a, b)
    if apart == 0:
        return "the losses of all steps are equal to the last bit"
    # Rounding grows over the steps; another order of summation alone leads this far.
    allowed = 0.1 if dtype == "bf16" else 0.02
    verdict = "they agree" if apart <= allowed else "THEY DISAGREE"
    return f"the losses of a step differ by {apart:.2e} at most: {verdict}"


def show_seam(killed: Run, whole: Run, died_at: int) -> None:
    """The losses of a run that was killed in a step, as a curve, and whether they are the other's.

    Half of the rows are around the step.
    """
    n_steps = len(killed.steps)
    spread = {round(i * (n_steps - 1) / SEAM_ROWS) for i in range(SEAM_ROWS + 1)}
    near = {step for step in range(died_at - 3, died_at + 4) if 0 <= step < n_steps}
    highest = max(step["loss"] for step in killed.steps)
    print("\n  step      loss")
    for at in sorted(spread | near):
        loss = killed.steps[at]["loss"]
        mark = "  <- killed in this step, and made again" if at == died_at else ""
        print(f"{at + 1:6d}  {loss:8.4f}  {'#' * round(SEAM_WIDTH * loss / highest)}{mark}")
    kinds = ("loss", "grad_norm")
    rows = [[tuple(step[kind] for kind in kinds) for step in run.steps] for run in (killed, whole)]
    if rows[0] == rows[1] and killed.end == whole.end:
        print(f"\nAll {n_steps} losses and gradient norms are those of the run that nobody killed,")
        print("to the last bit.")
    else:
        print("\nTHEY DISAGREE with the run that nobody killed.")


def loss_table(runs: dict[str, Run]) -> Table:
    """The losses of some steps, first and last among them, one column an implementation."""
    table = Table(title="loss", title_justify="left")
    for heading in ("step", *runs):
        table.add_column(heading, justify="right")
    n_steps = min(len(run.steps) for run in runs.values())
    shown = sorted({round(i * (n_steps - 1) / (LOSS_ROWS - 1)) for i in range(LOSS_ROWS)})
    for row in shown:
        losses = (f"{run.steps[row]['loss']:.6f}" for run in runs.values())
        table.add_row(str(next(iter(runs.values())).steps[row]["step"] + 1), *losses)
    table.add_section()
    table.add_row("validation", *(f"{run.end['validation_loss']:.6f}" for run in runs.values()))
    return table


def figure_table(runs: dict[str, Run]) -> Table:
    """Speed and memory, with the ratio of the first run to the second if there are two."""
    table = Table(title="speed and memory", title_justify="left")
    table.add_column("")
    for name in runs:
        table.add_column(name, justify="right")
    columns = [figures(run) for run in runs.values()]
    if len(columns) == 2:
        table.add_column(" / ".join(runs), justify="right")
    rows = (
        ("tokens/s", "tokens_per_s", "{:,.0f}"),
        ("median step, ms", "step_ms", "{:.1f}"),
        ("peak memory, MiB", "peak_mib", "{:.1f}"),
    )
    for label, field, form in rows:
        values = [getattr(column, field) for column in columns]
        ratio = [f"{values[0] / values[1]:.2f}"] if len(values) == 2 else []
        table.add_row(label, *(form.format(v) for v in values), *ratio)
    return table


def show(runs: dict[str, Run]) -> None:
    """Prints losses, figures and the text that the first model wrote."""
    console = Console()
    first = next(iter(runs.values()))
    console.print()
    console.print(loss_table(runs))
    if len(runs) == 2:
        console.print(agreement(*runs.values(), first.start["config"]["dtype"]))
    console.print()
    console.print(figure_table(runs))
    console.print(
        "Memory: the largest PSS of a rank, read after each forward and backward,\n"
        "above what it was before the model was built.",
        style="dim",
    )
    if first.end["sample"]:
        console.print(f"\nText that the {next(iter(runs))} model wrote:\n", style="bold")
        console.print(first.end["sample"], markup=False, highlight=False, soft_wrap=True)
        console.print()


def draw(runs: dict[str, Run], path: Path) -> None:
    """Saves loss, step time and memory over the steps as one picture."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = (
        ("loss", lambda s: s["loss"]),
        ("step time, ms", lambda s: 1e3 * s["seconds"]),
        ("memory above start, MiB", lambda s: s["memory_bytes"] / MIB),
    )
    figure, axes = pyplot.subplots(1, len(panels), figsize=(15, 4.2), layout="constrained")
    for axis, (title, value) in zip(axes, panels, strict=True):
        # The first run is drawn last and thin, so that equal curves are both seen.
        for i, (name, run) in reversed(list(enumerate(runs.items()))):
            steps = [s["step"] + 1 for s in run.steps]
            style = {"lw": 1.2, "alpha": 1.0} if i == 0 else {"lw": 3.0, "alpha": 0.5}
            colour = COLOURS.get(name)
            axis.plot(steps, [value(s) for s in run.steps], label=name, color=colour, **style)
        axis.set(title=title, xlabel="step")
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    axes[0].legend()
    start = next(iter(runs.values())).start
    figure.suptitle(
        f"GPT of {start['n_parameters'] / 1e6:.2f}M parameters, {start['config']['ranks']} ranks, "
        f"{start['config']['dtype']}, torch {start['torch']}"
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
