"""Trains a small GPT on Python's standard-library source, sharded with `fully_shard`.

  torchrun --nproc_per_node 2 examples/train_gpt.py --impl fsdp_c

The script is the same for fsdp_c and for torch but for the module that `fully_shard` comes from.
SIGINT and SIGTERM end it after the step at hand with a checkpoint that `--resume` goes on from.
With --snapshots it goes on from memory where torchrun (--max-restarts) starts it again.
"""

import argparse
import contextlib
import importlib
import math
import os
import signal
import time
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import checkpoint
import torch
import torch.distributed as dist
import torch.nn.functional as F
from corpus import Corpus
from gpt import GPT, GPTConfig, generate
from measure import StopRequest, proportional_bytes
from progress import open_progress
from runlog import Writer, log_path
from settings import training_options
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

MODULES = {"fsdp_c": "fsdp_c", "torch": "torch.distributed.fsdp"}
WARMUP_STEPS = 20
WEIGHT_DECAY = 0.1
MAX_GRAD_NORM = 1.0
VALIDATION_BATCHES = 10
SHAPE_OPTIONS = ("layers", "dim", "seq")  # a checkpoint of another shape cannot be loaded
EXACT_OPTIONS = ("steps", "batch", "lr", "dtype", "seed")  # changed, the losses differ


class StepResult(NamedTuple):
    """One step as this rank saw it."""

    loss: float
    grad_norm: float
    seconds: float
    peak_bytes: int


class StepReport(NamedTuple):
    """One step as all ranks saw it; equal on every rank."""

    loss: float
    peak_bytes: int
    stop: bool


def warm_up(options: argparse.Namespace) -> None:
    """One step of a tiny unsharded model, so that code pages do not count as memory of training."""
    model = GPT(GPTConfig(layers=1, dim=32, heads=1, seq=options.seq))
    optimizer = make_optimizer(model, options.lr)
    tokens = torch.zeros(1, options.seq, dtype=torch.long)
    F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
    optimizer.step()


def build_model(fsdp: ModuleType, options: argparse.Namespace) -> nn.Module:
    """The sharded model: each block is a unit, the rest is the root's."""
    torch.manual_seed(options.seed)
    model = GPT(
        GPTConfig(layers=options.layers, dim=options.dim, heads=options.dim // 32, seq=options.seq)
    )
    keywords: dict[str, Any] = {"mesh": init_device_mesh("cpu", (dist.get_world_size(),))}
    if options.dtype == "bf16":
        keywords["mp_policy"] = fsdp.MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32
        )
    for block in model.blocks:
        fsdp.fully_shard(block, **keywords)
    return fsdp.fully_shard(model, **keywords)


def make_optimizer(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    """AdamW that decays matrices and leaves biases, norms and the embedding as they are."""
    decay = {p for n, p in model.named_parameters() if p.ndim > 1 and "embed" not in n}
    groups = [
        {"params": [p for p in model.parameters() if p in decay], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in model.parameters() if p not in decay], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=True)


def learning_rate(step: int, options: argparse.Namespace) -> float:
    """Linear warm-up, then a cosine down to a tenth."""
    if step < WARMUP_STEPS:
        return options.lr * (step + 1) / WARMUP_STEPS
    done = (step - WARMUP_STEPS) / max(1, options.steps - WARMUP_STEPS)
    return options.lr * (0.55 + 0.45 * math.cos(math.pi * done))


class Trainer:
    """Everything that one rank holds during a run."""

    def __init__(self, options: argparse.Namespace):
        self.options = options
        self.rank, self.n_ranks = dist.get_rank(), dist.get_world_size()
        self.corpus = Corpus()
        warm_up(options)
        self.bytes_before = proportional_bytes()
        self.model = build_model(importlib.import_module(MODULES[options.impl]), options)
        self.optimizer = make_optimizer(self.model, options.lr)
        self.folder = options.out / options.impl / "checkpoints"
        self.snapshots: Any = None
        if options.snapshots:
            import fsdp_c

            self.snapshots = fsdp_c.Snapshots(self.model, self.optimizer)

    def config(self) -> dict[str, Any]:
        """What a checkpoint says about the run that wrote it."""
        names = (*SHAPE_OPTIONS, *EXACT_OPTIONS)
        return {name: getattr(self.options, name) for name in names} | {"ranks": self.n_ranks}

    def resume(self) -> int:
        """Loads the last checkpoint and returns the step to go on with, 0 without a checkpoint."""
        found = checkpoint.finished(self.folder)
        if not found:
            self.say(f"no checkpoint below {self.folder}, so training starts from the beginning")
            return 0
        progress = checkpoint.load(
            found[-1], self.model, self.optimizer, self.config(), SHAPE_OPTIONS
        )
        now = self.config()
        changed = [
            f"{name} {progress['config'][name]} -> {now[name]}"
            for name in (*EXACT_OPTIONS, "ranks")
            if progress["config"][name] != now[name]
        ]
        self.say(f"resumed from {found[-1]}, at step {progress['step']}")
        if changed:
            self.say(f"the losses differ from those of one run in a piece: {', '.join(changed)}")
        return progress["step"]

    def resume_from_memory(self) -> int:
        """As `resume`, with what this run's ranks have kept before they were started again."""
        step = self.snapshots.resume()
        if step:
            self.say(f"started again; goes on after step {step}, from memory")
        return step

    def is_to_die(self, step: int) -> bool:
        """Whether this rank is the one that shows what happens then."""
        is_first_life = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
        return step == self.options.die_at and is_first_life and self.rank == self.n_ranks - 1

    def say(self, text: str) -> None:
        if self.rank == 0:
            print(f"{self.options.impl}: {text}", flush=True)

    def save(self, step: int) -> Path:
        return checkpoint.save(self.folder, step, self.model, self.optimizer, self.config())

    def loss(self, key: tuple[int, ...], validation: bool = False) -> torch.Tensor:
        inputs, targets = self.corpus.batch(
            key, self.options.batch, self.options.seq, validation=validation
        )
        return F.cross_entropy(self.model(inputs).flatten(0, 1), targets.flatten())

    def step(self, step: int) -> StepResult:
        """One optimizer step. Reading the memory takes milliseconds and is not timed."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(step, self.options)
        began = time.perf_counter()
        loss = self.loss((self.options.seed, step, self.rank))
        seconds = time.perf_counter() - began
        peak_bytes = proportional_bytes()

        began = time.perf_counter()
        loss.backward()
        seconds += time.perf_counter() - began
        peak_bytes = max(peak_bytes, proportional_bytes())

        began = time.perf_counter()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), MAX_GRAD_NORM)
        if self.is_to_die(step):
            print(f"rank {self.rank} kills itself in step {step + 1}", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        self.optimizer.step()
        self.optimizer.zero_grad()
        seconds += time.perf_counter() - began
        return StepResult(loss.item(), norm.full_tensor().item(), seconds, peak_bytes)

    def agree(self, result: StepResult, stop: bool) -> StepReport:
        """Brings the ranks' views together. All stop after the same step, or none does."""
        mine = torch.tensor(
            [result.loss, result.peak_bytes - self.bytes_before, float(stop)], dtype=torch.float64
        )
        views = [torch.empty_like(mine) for _ in range(self.n_ranks)]
        dist.all_gather(views, mine)
        loss, peak_bytes, stops = torch.stack(views).unbind(1)
        return StepReport(loss.mean().item(), int(peak_bytes.max()), bool(stops.any()))

    @torch.no_grad()
    def validation_loss(self) -> float:
        """The loss on files that training never reads, averaged over ranks."""
        total = torch.zeros(())
        for i in range(VALIDATION_BATCHES):
            total += self.loss((self.options.seed, i, self.rank), validation=True)
        dist.all_reduce(total)
        return total.item() / (VALIDATION_BATCHES * self.n_ranks)

    def sample(self) -> str:
        """Text that the model writes; the same on every rank."""
        # The parameters stay whole over the many small forwards.
        self.model.set_reshard_after_forward(False)
        text = generate(self.model, b"def ", self.options.sample_bytes, seed=self.options.seed)
        return text.decode("utf-8", errors="replace")


def train(trainer: Trainer, first_step: int, stop: StopRequest, log: Writer | None) -> int:
    """Trains until the last step or a request to stop; returns the number of steps done."""
    options = trainer.options
    n_tokens = options.batch * options.seq * trainer.n_ranks
    bar = open_progress(options.impl, first_step, options.steps) if trainer.rank == 0 else None
    saved, done = first_step, first_step
    for step in range(first_step, options.steps):
        result = trainer.step(step)
        done = step + 1
        if trainer.snapshots:
            trainer.snapshots.take(done)
        report = trainer.agree(result, bool(stop))
        if log and bar:
            log.write(
                "step",
                step=step,
                loss=report.loss,
                grad_norm=result.grad_norm,
                seconds=result.seconds,
                tokens=n_tokens,
                memory_bytes=report.peak_bytes,
            )
            bar.show(
                step,
                f"loss {report.loss:.3f}  {n_tokens / result.seconds:,.0f} tokens/s  "
                f"{report.peak_bytes / 2**20:.0f} MiB",
            )
        if report.stop:
            break
        if done % options.save_every == 0:
            trainer.save(done)
            saved = done
    if bar:
        bar.close()
    if saved != done:
        trainer.save(done)
    return done


def run(options: argparse.Namespace, stop: StopRequest) -> None:
    trainer = Trainer(options)
    first_step = trainer.resume() if options.resume else 0
    if trainer.snapshots:
        first_step = trainer.resume_from_memory() or first_step
    log = None
    if trainer.rank == 0:
        log = Writer(log_path(options.out, options.impl), first_step)
        log.write(
            "start",
            pid=os.getpid(),
            impl=options.impl,
            torch=torch.__version__,
            n_parameters=sum(p.numel() for p in trainer.model.parameters()),
            config=trainer.config(),
        )
    with contextlib.closing(log) if log else contextlib.nullcontext():
        done = train(trainer, first_step, stop, log)
        if done < options.steps:
            trainer.say(
                f"stopped after step {done} of {options.steps}; --resume goes on from there"
            )
            if log:
                log.write("end", interrupted=True, n_steps=done)
            return
        if trainer.snapshots:
            trainer.snapshots.close()
        validation_loss = trainer.validation_loss()
        trainer.say(f"validation loss {validation_loss:.4f}")
        sample = trainer.sample() if options.sample_bytes > 0 else ""
        if log:
            log.write("end", interrupted=False, validation_loss=validation_loss, sample=sample)


def main() -> None:
    stop = StopRequest()
    options = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], parents=[training_options()]
    ).parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    dist.init_process_group("gloo")
    try:
        run(options, stop)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
