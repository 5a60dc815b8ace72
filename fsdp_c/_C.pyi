"""The extension: what csrc/bind shows of the core and of its own.

Arguments go by name where there are several of them. Errors: ValueError for what is wrong with an
argument, MemoryError, OSError, TimeoutError (a deadline has passed), NotImplementedError,
KeyboardInterrupt, else RuntimeError (a rank has failed, or left step); they name unit and rank.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

# ---- the process ----

BORROWED_BYTES_MAX: int  # of a unit whose gradients are borrowed from autograd until they are sent

def kernels() -> str:
    """The instruction set in use."""

def use_kernels(name: str) -> bool:
    """False if this CPU lacks it."""

def close() -> None:
    """From now on other threads than the main one stay out of the interpreter, which ends."""

def find_end() -> str | None:
    """Which rank of this host is at its end, and how; None: none that shares memory with this."""

def set_place(*, tell: Callable[[], Any], count: Callable[[int], int | None]) -> None:
    """`tell() -> Place`: where this rank's program is, for peers that wait for it. `count(group)`:
    how many of its collectives have begun."""

def rail_messages(group: str) -> int:
    """How many messages between hosts a process group has carried for this rank, by its name: it
    numbers them among its collectives."""

def open_window(*, run: str, rank: int, world: int, start_ticks: int, traces: bool) -> None:
    """This process is seen from outside from now on; see window/window.h."""

def callbacks() -> list[str]:
    """The names of what it asks of Python."""

def set_callbacks(**functions: Callable[..., Any]) -> None:
    """All of them."""

def watch_functions(*, functions: Sequence[Any]) -> None:
    """Roots look around in their next forward when one of the functions (WatchedFunction) is
    replaced; not by those of an earlier call."""

def call_directly(cls: type, /) -> None:
    """Modules of the class whose only hooks are their unit's run these around forward in C, unless
    the class has a way of its own to be called."""

def count_checkpoint() -> None:
    """The forward that runs will be run again, in part, by its backward."""

def n_steps() -> int:
    """How many steps of optimizers, and loads, have been counted."""

# ---- memory of tensors ----

def make_noted(tensor: Tensor, /) -> Tensor:
    """One on the same memory whose unit notices `tensor.data`."""

def note_data(tensor: Tensor, /) -> None:
    """The same of a new tensor of a subclass."""

def take_memory(*, tensor: Tensor, text: str) -> Tensor:
    """Its storage has none from now on, and reading it raises the text. Returns the bytes."""

def give_memory(*, tensor: Tensor, bytes: Tensor) -> None:
    """Its storage gets what `bytes` has, which has none from then on."""

# ---- ranks ----

class Transport:
    """Moves bytes between the ranks of one process group. Collective."""

    def __init__(
        self,
        *,
        name: str,
        rank: int,
        global_ranks: Sequence[int],
        timeout_seconds: float,
        exchange: Callable[..., bytes],
        messages: Any,
        rails: Any,
        kind: str,
    ) -> None: ...
    @property
    def kind(self) -> str:
        """'shm', 'rails' or 'callback'"""
    @property
    def rank(self) -> int:
        """This rank in the group."""
    def check(self) -> None:
        """Raises if the transport cannot be used any more."""
    def abort(self, why: str, /) -> None:
        """Breaks it on every rank: waits of peers end with this text."""
    def awaited(self) -> tuple[int, float] | None:
        """The rank of the group, on another host, that this one waits for over rails, and for how
        many seconds. From any thread."""
    def failed(self) -> tuple[int, int]:
        """The last phase over rails that this rank left by an exception, or 0, and how many
        collectives it had ended then. From any thread."""
    def hear(self, *, rank: int, phase: int, after: int) -> None:
        """What another rank's `failed` says: a wait for it in that phase ends."""
    def tell(self, *, rank: int, text: str) -> None:
        """What has been found out about a rank of the group, while this one waits for it over
        rails: `top` shows it."""
    def sent(self) -> list[tuple[int, int]]:
        """Bytes and messages that went to each host over rails, by its number; else empty."""
    def interrupt(self, why: str, /) -> None:
        """Ends this host's waits over rails, with this text as the cause. From any thread."""

class Comm:
    """Blocking collectives on CPU tensors. Collective."""

    def __init__(self, *, transport: Transport) -> None: ...
    @property
    def transport(self) -> Transport: ...
    def collect(
        self, *, what: str, output: Tensor, input: Tensor | None, divisor: float, src: int
    ) -> None:
        """See fc_comm_check_arrays in comm/comm.h; without an input in place."""
    def all_to_all(self, *, output: Tensor, input: Tensor, counts: Sequence[int]) -> None:
        """`counts`: elements from rank to rank, row by row."""
    def exchange(
        self,
        *,
        received: list[list[Tensor]],
        sent: list[list[Tensor]],
        counts: Sequence[int],
        itemsize: int,
    ) -> None:
        """The same between lists of tensors of any strides, a list for each rank."""
    def all_agree(self, is_true: bool, /) -> bool:
        """Whether it is true on all ranks."""
    def barrier(self) -> None: ...

class Beats:
    """Leaves a sign of life in the group's store each second, whatever the interpreter does, until
    it is dropped."""

    def __init__(self, *, group: str, rank: int) -> None: ...
    def say(self, words: str, /) -> None:
        """What stands beside this rank's next signs."""
    def want(self, *, ranks: Sequence[int]) -> None:
        """Whose signs are looked for from now on."""
    def heard(self, rank: int, /) -> tuple[str, float] | None:
        """A rank's words, and seconds since its last new sign."""
    def answered(self) -> float:
        """Seconds since the store answered last."""

def nccl_open(*, path: str, is_loaded: bool) -> dict[str, Any]:
    """The library as {handle, version, text}. `is_loaded`: only if it is already."""

def cuda_events(*, path: str, gpu: int) -> Any:
    """See fc_cuda_events_open in device/events.h."""

class NcclGroup:
    """NCCL for the ranks of one process group. Collective."""

    def __init__(
        self,
        *,
        name: str,
        rank: int,
        global_ranks: Sequence[int],
        timeout_seconds: float,
        exchange: Callable[..., bytes],
        library: Any,
        events: Any,
        is_one: bool,
    ) -> None: ...
    @property
    def text(self) -> str:
        """Ranks, version and communicators."""
    def watch(self) -> None:
        """Raises if something is wrong with NCCL or a rank."""
    def close(self) -> None:
        """Waits until all work is done everywhere, and ends. Collective."""
    def leave(self, seconds: float, /) -> None:
        """Ends here; aborts what does not end within so long."""
    def abort(self, why: str, /) -> None:
        """Ends here, and on the ranks of this host, with this text."""
    def wait(self, *, is_ready: Callable[[], bool], what: str) -> None:
        """Until `is_ready()` is true, watching the ranks."""
    def collect(
        self,
        *,
        what: str,
        outputs: Sequence[Tensor],
        inputs: Sequence[Tensor],
        stream: int,
        unit: str,
    ) -> None:
        """See fc_nccl_collect in transport/nccl.h; a stream is its handle."""

# ---- units ----

class Streams:
    """The schedule of the units of a root on a device."""

    def __init__(self, *, device: torch.device, by_torch: bool, kernels: str) -> None: ...
    @staticmethod
    def tells_handles() -> bool:
        """Whether streams of CUDA can be handed to kernels and to NCCL."""
    def connect(
        self,
        *,
        group: str,
        nccl: NcclGroup | None,
        messages: Any,
        rank: int,
        n_ranks: int,
        may_scale: bool,
    ) -> None:
        """Who does the collectives of that name: `messages` in sight of others, NCCL or, with None
        for both, the process group that is registered under it. `may_scale`: gradients may be
        divided by it before they are added up."""

class Domain:
    """Units that travel over one process group."""

    def __init__(
        self,
        *,
        transport: Transport,
        streams: Streams | None,
        units: Sequence[Any],
        is_replicate: bool,
        is_counted: bool,
        is_packed: bool,
        shard_rank: int,
        n_shards: int,
        batch_bytes: int,
    ) -> None: ...
    @property
    def streams(self) -> Streams | None:
        """What the units run in on a device."""
    @property
    def is_mapped(self) -> bool:
        """Whether units lie in memory of all ranks."""
    @staticmethod
    def plan(
        *, is_replicate: bool, units: Sequence[Any], n_shards: int, n_ranks: int, is_mapped: bool
    ) -> dict[str, int]:
        """The sizes of such a domain."""
    @staticmethod
    def trim_slots() -> None:
        """Gives back the free slots of all domains."""
    @staticmethod
    def account() -> dict[str, int]:
        """Bytes that the core holds in this process, by purpose."""
    def sizes(self) -> dict[str, int]:
        """Bytes by purpose."""
    def trim(self) -> int:
        """Gives back what is held for speed alone; returns bytes of reduce slots."""
    def waits(self, reset: bool, /) -> dict[str, Any]:
        """{forwards, backwards, waits: [{unit, kind, count, ns, longest_ns, longest_rank}],
        ns_by_rank: {rank: ns}}"""
    def layout(self, unit: int, /) -> dict[str, Any]:
        """{full_bytes, params: [{offset, packed, is_aliased}]}"""
    def watch(self, transport: Transport, /) -> None:
        """Over messages: where ranks see what the others are about to do."""
    def name_openers(self, names: Sequence[str], /) -> None:
        """Of the modules that may begin a phase, the root first."""
    def leave(self) -> None:
        """Peers that wait for this rank get an error from now on."""
    def await_left(self) -> None:
        """Waits until all peers have left too; RuntimeError if one goes on."""

class StepCounter:
    """How often one optimizer has stepped."""

    def count(self) -> None:
        """It has."""

class Group:
    """Base of FSDPParamGroup: one unit of the core."""

    # torch's
    reduce_grads: bool
    all_reduce_grads: bool
    reshard_after_backward: bool
    reduce_scatter_unused_params: bool
    unshard_in_backward: bool
    force_sum_reduction_for_comms: bool
    post_forward_mesh_info: Any
    gradient_divide_factor: float | None
    _training: int  # TrainingState, as its index
    _post_backward_pending: bool
    """Whether gradients of a backward that went by are still to be reduced."""
    _core_calls_methods: bool
    """Whether hooks call the group's methods, of which somebody has replaced one."""

    def _bind(
        self,
        *,
        domain: Domain,
        index: int,
        replicate: Domain | None,
        smaller: Domain | None,
        post_mesh: Any,
        params: Sequence[Any],
        flat: Tensor,
        on_device: Any,
    ) -> None: ...
    def _unbind(self) -> None:
        """Reshards and leaves the core."""
    def _set_aside(self) -> None:
        """The same until the next _bind, which takes over gradients that wait."""
    @property
    def _is_bound(self) -> bool:
        """Whether the unit runs on the core; where it does not, properties are False or 0, and
        methods do nothing."""
    def _core_go_on(self) -> bool:
        """Does what the method stands for; False if others than hooks called it."""
    def _core_unshard_async(self) -> None:
        """Gathers; registration is left to _core_unshard."""
    def _core_unshard(self) -> None:
        """Gathers if needed and registers the unsharded parameters."""
    def _core_reshard(self) -> None:
        """Registers the sharded parameters; within a forward that ends with slices those."""
    def _core_keep_after_forward(self) -> None:
        """Forward leaves the unsharded parameters registered, until the next reshard."""
    def _core_keep_storage(self, keeps: bool, /) -> None:
        """Whether reshard leaves the unsharded parameters' memory as it is."""
    def _core_partial_sums(self) -> list[Tensor | None]:
        """Of each parameter a flat copy, in its reduce dtype, of what replicas have not seen."""
    def _core_drop_partial_sums(self) -> None: ...
    def _core_accumulated(self, index: int, /) -> Tensor | None:
        """What is accumulated beside a parameter."""
    def _core_set_accumulated(self, *, index: int, tensor: Tensor | None) -> None: ...
    def _core_set_prefetch(self, *, in_backward: bool, groups: Sequence[Group]) -> None:
        """Whom to gather behind this one on a device."""
    def _core_set_reduce_group(self, name: str, /) -> None:
        """The process group that sums gradients on a device."""
    def _core_follow(self, counter: StepCounter, /) -> None:
        """Of an optimizer that holds shards of it."""
    def _core_count_load(self) -> None:
        """Its shards are loaded, on all ranks."""
    def _core_release_gradients(self) -> None:
        """Forgets gradients that are kept for reuse."""
    def _core_release_sums(self) -> None:
        """Frees the memory for sums over shards, unless some wait in it."""
    def _core_traffic(self) -> dict[str, int]:
        """What the unit has moved, see fc_traffic in engine/reduction.h."""
    @property
    def _core_is_unsharded(self) -> bool: ...
    @property
    def _core_has_slices(self) -> bool:
        """Whether slices stand in the place of its shards."""
    @property
    def _core_is_intact(self) -> bool:
        """Whether every shard is where set-up put it."""
    @property
    def _core_is_mapped(self) -> bool:
        """Whether its ranks share its memory."""
    @property
    def _core_in_phase(self) -> bool:
        """Whether a forward or backward is going on."""
    @property
    def _core_is_pending(self) -> bool:
        """unshard(async_op=True) that was not waited for."""
    @property
    def _core_awaits_gradients(self) -> bool:
        """Whether a backward went through the unit and gave its parameters nothing."""
    @property
    def _core_is_kept_after_forward(self) -> bool:
        """Whether forward leaves the unsharded parameters registered."""
    @property
    def _core_has_accumulated(self) -> bool:
        """Whether gradients wait for a later reduction."""
    @property
    def _core_has_partial_sums(self) -> bool:
        """Whether sums over shards wait for the replicas."""
    @property
    def _core_partial_bytes(self) -> int:
        """Of the memory for such sums."""
    @property
    def _core_why_staged(self) -> str:
        """Why what a device gathers is copied out; empty: it is not."""
    @property
    def _core_is_resident(self) -> bool:
        """Whether one rank's shards on a device are used where they lie."""
    @property
    def _core_was_used(self) -> bool:
        """Whether it was ever unsharded."""

class Context:
    """Base of FSDPStateContext: what the units of a root share, under torch's names."""

    is_last_backward: bool
    manual_backward_finalization: bool
    manual_backward_finalization_active: bool | None
    """Whether the running backward, if there is one, waits for finalize_backward()."""
    post_backward_final_callback_queued: bool
    """Whether a backward is going on, or has failed."""
    gradient_reduction_pending: bool
    """Whether a handle of finalize_backward() is to be waited for."""

class Root:
    """A root and all below it."""

    def __init__(
        self, *, states: Sequence[State], domains: Sequence[Domain], context: Context
    ) -> None: ...
    calls_methods: bool  # hooks call the methods of some groups
    @property
    def states(self) -> list[Any]:
        """In the order of named_modules."""
    @property
    def domains(self) -> list[Domain]: ...
    @property
    def backward(self) -> int:
        """The number of the running backward, or of the next one."""
    @property
    def iteration_root(self) -> Any:
        """The state that began the current forward."""
    @property
    def is_between_steps(self) -> bool:
        """Whether no forward or backward is going on or to come, and no gradient waits for a
        reduction."""
    @property
    def awaits_end(self) -> bool:
        """Whether a backward is open that autograd will not end."""
    def post_backward(self, group: Group, /) -> None:
        """Reshards it and posts its gradients."""
    def end_backward(self) -> None:
        """Finishes all reductions and closes the phase."""
    def finalize_backward(self) -> None:
        """Reduces what the backwards of a manual ending left."""
    def look_again(self) -> None:
        """The next forward asks who looks at the units' collectives."""
    def reset(self) -> None:
        """Drops everything of the running step."""
    def drop_raised_forward(self) -> None:
        """Ends a forward that was left by an exception, as the next one would."""

class State:
    """Base of FSDPState: the hooks of one fully_shard call."""

    _modules: tuple[torch.nn.Module, ...]
    _modules_to_run_forward: set[torch.nn.Module]
    _is_compiled: bool
    _is_strict: bool
    _fills_in_gradients: bool
    _training: int  # TrainingState, as its index
    @property
    def _root(self) -> Root | None:
        """None before the first forward, and where the state was handed over to torch's."""
    def _set_casts(
        self,
        *,
        cast_inputs: bool,
        param_dtype: torch.dtype | None,
        output_dtype: torch.dtype | None,
    ) -> None: ...
    def _join(self, *, root: Root | None, groups: tuple[Group, ...]) -> None: ...
    def _hook_pre_forward(self, module: torch.nn.Module, args: Any, kwargs: Any, /) -> Any:
        """The forward pre-hook: None or (args, kwargs)."""
    def _hook_post_forward(self, module: torch.nn.Module, args: Any, output: Any, /) -> Any:
        """The forward hook: the output."""
    def _takes_core(self) -> bool:
        """Before a forward: whether the core runs it, or the state was handed over to torch's."""
    def _enter(self, args: Any, kwargs: Any, /) -> tuple[Any, Any]: ...
    def _leave(self, output: Any, /) -> Any: ...
    def _core_pre_backward(self) -> None:
        """What a gradient of an output sets off."""

# ---- optimizers ----

class Layouts:
    """Meshes and placements of DTensors, numbered as they come; collects local tensors."""

    def collect(self, tensors: list[Tensor], /) -> Locals | None:
        """None: one of them is no memory of real numbers, or none is a DTensor."""
    def collect_gradients(self, tensors: list[Tensor], /) -> Locals | None:
        """The same of the gradients that tensors have."""
    def number(self, spec: Any, /) -> int:
        """That of the spec's layout."""
    def spec(self, number: int, /) -> Any:
        """The first one seen of the layout."""

class Locals:
    """The local tensors of a list of tensors."""

    @property
    def layouts(self) -> tuple[int, ...]:
        """Numbers of the layouts, each once, as they came."""
    @property
    def n_meshes(self) -> int:
        """Plain tensors count as one."""
    @property
    def is_uniform(self) -> bool:
        """Of one device and dtype."""
    @property
    def is_flat(self) -> bool:
        """Contiguous float32 on the CPU."""
    def given(self) -> list[Tensor]:
        """As they were collected."""
    def tensors(self) -> list[Tensor]:
        """The local ones."""
    def numbers(self) -> tuple[int, ...]:
        """Each tensor's layout; -1: a plain one."""
    def part(self, indices: Iterable[int], /) -> Locals:
        """Of these tensors."""
    def norms(self) -> Tensor:
        """The 2-norm of each local tensor, which are flat; float32, [n]."""
    def multiply(self, factor: float, /) -> None:
        """Multiplies the local tensors, which are flat, in place."""
    def count_versions(self) -> None:
        """DTensors whose local tensors were changed count that."""

class Params:
    """The parameters of an optimizer's group; `sharded` has the ids of those to step here."""

    def __init__(self, *, params: Sequence[Tensor], sharded: set[int]) -> None: ...
    def is_for(self, params: list[Tensor], /) -> bool:
        """Whether it was made for this list."""
    def locals(self, rows: Iterable[tuple[Any, ...]], /) -> list[tuple[Any, ...] | None]:
        """Local tensors for the rows of an optimizer's lists (parameter, gradient, state ...) whose
        DTensors are laid out alike, None for others. Scalars and None stay as they are."""
    def collect(self, *, state: Any, keys: Sequence[str]) -> list[tuple[Any, ...]] | None:
        """Local tensors of parameters and gradients, and what the state has under each key, for
        every parameter that has a gradient. None: a parameter lacks one of them."""
    def step_adam(
        self,
        *,
        state: Any,
        lr: float,
        beta1: float,
        beta2: float,
        eps: float,
        weight_decay: float,
        decoupled_weight_decay: bool,
        amsgrad: bool,
        maximize: bool,
        fused_lanes: int,
    ) -> bool:
        """One step of Adam for every parameter that has a gradient. False: torch must do it,
        nothing was touched."""
    def step_sgd(
        self,
        *,
        state: Any,
        lr: float,
        momentum: float,
        dampening: float,
        weight_decay: float,
        nesterov: bool,
        maximize: bool,
        fused_lanes: int,
    ) -> bool:
        """The same of SGD."""

def norm(values: Tensor, /) -> Tensor:
    """The 2-norm of contiguous float32 memory."""

def clip_factor(*, max_norm: float, norm: float) -> float:
    """What torch multiplies gradients by."""

# ---- snapshots ----

SNAPSHOT_PAGE: int  # bytes before the data of a file
SNAPSHOT_TEXT_AT: int  # of the owner's text in the page

def snapshot_room(*, tensors: Sequence[Tensor], index_bytes: int) -> int:
    """How long a file must be for them, in bytes."""

def snapshot_layouts(tensors: Sequence[Tensor], /) -> bytes:
    """Dtypes, sizes and strides, to see whether they are what they were."""

def snapshot_facts(file: Any, /) -> dict[str, int] | None:
    """{sequence, step, data_bytes, index_bytes}; None: no whole one is there."""

def snapshot_is_intact(file: Any, /) -> bool:
    """Whether its bytes are those that were written; reads them all."""

def snapshot_clear(file: Any, /) -> None:
    """It holds none from now on."""

def snapshot_header(file: Any, /) -> bytes:
    """What makes its snapshot count, for a copy of its data and index elsewhere."""

def snapshot_adopt(*, file: Any, header: bytes) -> bool:
    """Data and index count from now on. False: that is no header of a snapshot that fits."""

class SnapshotCopier:
    """Copies tensors into a file, in a thread of its own."""

    def start(
        self,
        *,
        locals: Sequence[Tensor],
        sources: Sequence[Tensor],
        shown: Sequence[Tensor],
        now: Sequence[bool],
        watched: Sequence[bool],
        index: Any,
        file: Any,
        sequence: int,
        step: int,
    ) -> None:
        """Tensors of `now` and the index are copied when it returns.

        `locals` are on the host; where the one of `sources` is another, on a device, it is copied
        there first, when its device gets to it. Those of `watched` must not change until then.
        """
    def finish(self) -> list[int]:
        """Places of tensors that were written before they were copied; none: it counts."""

class SnapshotRanks:
    """Pages of ranks in one folder, see snapshot/ranks.h."""

    def __init__(self, *, pages: Sequence[str], own: int, files: Sequence[str]) -> None: ...
    def word(self, *, rank: int, word: int) -> int:
        """Of a rank's page."""
    def set_word(self, *, word: int, value: int) -> None:
        """Of this rank's page."""
    def end(self) -> bool:
        """This rank has ended well. True: all have, and the files are gone."""
    def close(self) -> None:
        """The end of the process does nothing about them."""
