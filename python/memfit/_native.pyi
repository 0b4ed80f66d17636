"""The native half of memfit. Private: use the ``memfit`` package."""

from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, Literal, final

__all__ = [
    "AllocationBudget",
    "AllocationWindow",
    "LeaseClient",
    "ParkedCudaMemory",
    "ParkedMemory",
    "PlanSession",
    "PoolMachine",
    "Room",
    "Separation",
    "Snapshot",
    "Store",
    "StoredBlock",
    "Trace",
    "add_blocks",
    "alarm_event",
    "block_event",
    "broker_path",
    "bytes_text",
    "calibration",
    "check_profile",
    "check_step_budget",
    "context_bytes",
    "count_allocations",
    "counted_bytes",
    "decode_plan",
    "effect",
    "encode_plan",
    "evaluate",
    "expand_moment",
    "expand_numbers",
    "explanation_text",
    "file_kind",
    "forget_refusal",
    "front_page",
    "front_text",
    "gpu_memory",
    "gpu_profile",
    "half_of_free_host_bytes",
    "held_cuda_bytes",
    "instances",
    "is_counted",
    "label_blocks",
    "label_gone_blocks",
    "last_event",
    "last_refusal",
    "mark_allocations",
    "on_alarm",
    "oom_messages",
    "overflow_peaks",
    "parse_budget",
    "place",
    "plan",
    "plan_text",
    "predict",
    "prediction_text",
    "pruning",
    "refusals",
    "refused_bytes",
    "release_kept",
    "remove_blocks",
    "reserved_beside_model",
    "resident_bytes",
    "rooms",
    "run",
    "schema",
    "seed_blocks",
    "set_alarm",
    "set_overflow",
    "shrink_moment",
    "shrink_numbers",
    "survivors",
    "switch_alarm_off",
    "taken_bytes",
    "techniques",
    "track_text",
    "uncounted_blocks",
    "update_by_adam",
    "update_by_momentum",
    "verification",
]

@final
class AllocationBudget:
    """A budget for what torch allocates on the CPU, on until lifted or dropped."""

    def __new__(cls, budget_bytes: int) -> AllocationBudget:
        """Set it; where budgets are nested, the tightest counts.

        Raises:
            BudgetError: More is taken already.
        """

    def change(self, budget_bytes: int) -> None:
        """Set another number of bytes; once lifted, nothing.

        Raises:
            BudgetError: More is taken already; it stays as it was.
        """

    def lift(self) -> None:
        """End it; again, it does nothing."""

@final
class AllocationWindow:
    """A stretch of time with its own peak of CPU tensor bytes, open until closed or dropped."""

    def __new__(cls) -> AllocationWindow:
        """Begin one; its peak starts at what is live now."""

    def peak(self) -> tuple[int, int]:
        """Peak bytes so far and the number of the event that reached it; ``(0, 0)`` when closed."""

    def restart(self) -> None:
        """Begin it anew, with what is live now."""

    def read(self) -> dict[str, Any] | None:
        """What it has seen so far; ``None`` when closed."""

    def close(self) -> dict[str, Any] | None:
        """End it and say what it has seen; ``None`` when it was closed before."""

@final
class LeaseClient:
    """A connection to the broker; one line of work."""

    def __new__(cls, path: str | PathLike[str], name: str) -> LeaseClient:
        """Connect; ``name`` is what ``memfit ps`` shows."""

    @staticmethod
    def within(
        path: str | PathLike[str],
        name: str,
        wait_seconds: float | None,
        waits: Callable[[int | None], object] | None = None,
    ) -> LeaseClient:
        """Connect, and wait for a broker that is away."""

    def devices(self) -> dict[str, int]:
        """Capacity by device."""

    def acquire(
        self,
        claims: Mapping[str, int],
        floor: Mapping[str, int] | None,
        priority: int,
        wait_seconds: float | None,
        time_to_live_seconds: float | None,
        label: str | None,
        waits: Callable[[int | None], object] | None = None,
    ) -> tuple[int, int, dict[str, int]]:
        """Take a lease; returns its number, its revision and its bytes by device.

        ``waits`` is called now and then while it waits, with the number of requests before it.
        """

    def resize(
        self,
        lease: int,
        claims: Mapping[str, int],
        wait_seconds: float | None,
        waits: Callable[[int | None], object] | None = None,
    ) -> tuple[int, int, dict[str, int]]:
        """Make a lease larger or smaller."""

    def release(self, lease: int) -> None:
        """Give a lease back."""

    def held(self, lease: int) -> tuple[int, int, dict[str, int]] | None:
        """A lease as it stands; ``None`` when it has ended."""

    def asked_to_shrink(self, lease: int) -> dict[str, int] | None:
        """What the broker asked to shrink a lease to."""

    def decline(self, lease: int) -> None:
        """Answer a shrink request with no."""

    def status(self) -> dict[str, Any]:
        """Who holds what."""

@final
class ParkedCudaMemory:
    """Memory of a CUDA device that can be given back, and the copy of it."""

    def __new__(
        cls,
        length: int,
        device: int,
        folder: str | PathLike[str],
        *,
        allow_memory: bool = False,
        driver: str | None = None,
    ) -> ParkedCudaMemory:
        """Reserve addresses; nothing is behind them yet.

        Args:
            length: How many bytes.
            device: The device's number.
            folder: Where the file for what the host has no room for is made; it has no name.
            allow_memory: Accept a folder whose files are kept in memory.
            driver: A library that stands in for CUDA's driver in tests; its memory is the host's.

        Raises:
            ParkError: The folder cannot be used, or the driver refuses.
        """

    @property
    def address(self) -> int:
        """Where it is."""

    @property
    def length(self) -> int:
        """Its length in bytes: whole units of the device."""

    @property
    def is_parked(self) -> bool:
        """Whether it is given back."""

    @property
    def held_bytes(self) -> int:
        """Bytes of the device that it holds.

        Raises:
            ParkError: This is a fork of the process that it belongs to.
        """

    @property
    def host_bytes(self) -> int:
        """Bytes of the host's memory that its copy takes.

        Raises:
            ParkError: This is a fork of the process that it belongs to.
        """

    def open_to(self, end: int) -> None:
        """Have memory behind the first bytes; what is there already stays.

        Raises:
            ParkError: The device has no room; nothing has changed.
        """

    def tensor(self, start: int, length: int) -> Any:
        """A range of it as a tensor of bytes, in a DLPack capsule.

        Raises:
            ParkError: It has no such range.
        """

    def park(self, host_bytes: int | None = None) -> None:
        """Keep every byte and give the memory back.

        Args:
            host_bytes: Most bytes to keep in the host's memory; by default half of what is free.

        Raises:
            ParkError: Nothing has changed.
        """

    def to_disk(self) -> None:
        """Move what the host's memory keeps to the file.

        Raises:
            ParkError: Nothing has changed.
        """

    def wake(self) -> None:
        """Have every byte back at its address.

        Raises:
            ParkError: It is still parked.
        """

    def give_up(self) -> None:
        """Wake it and close its file: it cannot be parked any more.

        Raises:
            ParkError: It is still parked.
        """

    def statistics(self) -> dict[str, Any]:
        """What it did so far."""

@final
class ParkedMemory:
    """Memory whose pages can be given back, and the copy of them."""

    def __new__(
        cls,
        length: int,
        tensors: Sequence[tuple[Sequence[str], int, int]],
        folder: str | PathLike[str],
        source: str | PathLike[str] | None = None,
        *,
        allow_memory: bool = False,
    ) -> ParkedMemory:
        """Map memory.

        Args:
            length: How many bytes.
            tensors: Names, start and length of each tensor that will lie there, in order.
            folder: Where the file that parked bytes go to is made; it has no name.
            source: A safetensors file that the tensors were loaded from.
            allow_memory: Accept a folder whose files are kept in memory.

        Raises:
            ParkError: The folder or the file cannot be used, or there is no memory.
        """

    @property
    def address(self) -> int:
        """Where it is."""

    @property
    def length(self) -> int:
        """Its length in bytes: whole pages."""

    @property
    def is_parked(self) -> bool:
        """Whether its pages are given back."""

    @property
    def is_arriving(self) -> bool:
        """Whether it is awake and some of it still has to be brought in."""

    def park(self) -> None:
        """Keep every byte and give the pages back.

        Raises:
            ParkError: Nothing has changed.
        """

    def wake(self) -> None:
        """Have every byte back at its address.

        Raises:
            ParkError: It is still parked.
        """

    def begin_wake(self) -> None:
        """Begin to have every byte back; each is to be brought in before it is used.

        Where the files cannot be mapped, all of them are back when it returns.

        Raises:
            ParkError: It stays parked.
        """

    def bring_in(self, parts: Sequence[tuple[int, int]]) -> None:
        """Have some bytes back, compared; does nothing for those that are.

        Args:
            parts: Start and end of each part.

        Raises:
            ParkError: They cannot be read, or are not what was parked.
        """

    def give_up(self) -> None:
        """Wake it and close its files: it cannot be parked any more.

        Raises:
            ParkError: It is still parked.
        """

    def statistics(self) -> dict[str, Any]:
        """What it did so far."""

@final
class PlanSession:
    """The conversation that ends in the plan of one step; it asks, and is answered.

    An answer to another question than :meth:`next` asks, or of another step than the trace, raises
    ``UsageError`` and changes nothing.
    """

    def __new__(
        cls,
        request: Mapping[str, Any],
        place: str | None = None,
        *,
        front: bool = False,
        tells_leave: bool = False,
    ) -> PlanSession:
        """Begin one.

        Args:
            request: What is asked for.
            place: Where things may be offloaded to, if the request has no offer of it.
            front: For many budgets; it ends with :meth:`front`.
            tells_leave: A plan that does not fit says what leave to change numbers would bring.

        Raises:
            BudgetError: The request's budget cannot be read.
        """

    def next(self) -> dict[str, Any]:
        """What is needed now, and what there is to know about it: ``need``, and mostly ``of``.

        ``costs`` comes with the ``device_kind``; ``offer`` with that, the ``place``, and the
        ``profile`` of the device, where op times come from that; ``ways`` with those wanted;
        ``nothing`` with the ``plan``; ``trace`` and ``plan`` with nothing.
        """

    def trace(self, trace: Trace) -> None:
        """Answer with the trace."""

    def costs(self, costs: Mapping[str, Any]) -> None:
        """Answer with the cost source."""

    def offer(self, offer: Mapping[str, Any]) -> None:
        """Answer with how fast the place is."""

    def ways(self, trace: Trace | None) -> None:
        """Answer with the trace in other ways; ``None`` where it cannot be captured again."""

    def search(self, time_limit: float | None = None) -> None:
        """Answer with a plan, found in about so many seconds if they are given.

        Raises:
            UsageError: The costs are not those of the trace.
        """

    def front(self, budget: str | None = None) -> dict[str, Any]:
        """Plan for many budgets, on all cores, and for one that is asked for.

        Raises:
            BudgetError: The budget cannot be read.
            UsageError: The costs are not those of the trace.
        """

@final
class PoolMachine:
    """Which models of a pool are in memory, and who waits; decides, and moves nothing.

    A job is what to do (``wake``, ``park``, ``spill``, ``release``), the number of the model, and
    what the copy of a model that is parked may have of the host's memory.
    """

    def __new__(cls, budget: int, host: int | None = None) -> PoolMachine:
        """A pool without models: of the host, or of a device with so much host memory for copies.

        A device's allocator keeps what calls took until it is released.
        """

    def add(
        self, size: int, activations: int, is_pinned: bool, now: int
    ) -> tuple[tuple[int, bool, int] | None, tuple[str, int, int] | None]:
        """Add a model that is in memory.

        Returns:
            Its number, whether it may stay there, and what its copy may have of the host's memory
            if not; or why not, wanted and available bytes.
        """

    def copied(self, model: int, in_host: int) -> None:
        """Say what the copy has of a model that was parked when it was added."""

    def remove(self, model: int) -> bool:
        """Take a model out; false while it is used, moved or waited for."""

    def ask(self, model: int, activations: int, client: int, now: int) -> int:
        """Ask for a use; returns its ticket. The answer is among the answers, now or later."""

    def grow(self, running: int, by: int, now: int) -> int:
        """Ask for more activations of a use; returns a ticket, whose answer comes as for one."""

    def cancel(self, ticket: int) -> None:
        """Give up a request that has no answer."""

    def end(self, ticket: int, unsaved: int, now: int) -> None:
        """End a use; parking its model would write so many bytes."""

    def begin(self, now: int) -> tuple[str, int, int] | None:
        """The next job, begun by this."""

    def shed(self, target: int, now: int) -> tuple[str, int, int] | None:
        """Begin the next job so that no more than the target counts."""

    def aim(self, target: int, now: int) -> None:
        """Change the budget, to no more than the first; it comes down as bytes are given up."""

    def budget(self) -> int:
        """What may count now."""

    def short(self) -> int | None:
        """The budget that the first request lacks, whatever is parked."""

    def ended(self, kind: str, model: int, done: Mapping[str, int]) -> None:
        """A job has ended.

        Args:
            kind: What was done.
            model: The number of the model.
            done: Whether it ``is_done``, the bytes ``moved``, what the copy has ``in_host``, the
                microseconds it ``took``, and ``now``.

        Raises:
            UsageError: There is no such job, or something else is said of how it went.
        """

    def answers(self) -> list[tuple[int, tuple[str, int, int] | None]]:
        """Tickets answered since the last time: granted, or why not, wanted, available bytes."""

    def counted(self) -> int:
        """Bytes that count now."""

    def in_host(self) -> int:
        """Bytes of the host's memory that copies have now."""

    def statistics(self) -> dict[str, Any]:
        """What it did so far."""

@final
class Separation:
    """What of a step's model can be pruned."""

    @staticmethod
    def of(trace: Trace, request: Mapping[str, Any]) -> Separation:
        """Find the groups of channels in a step.

        Args:
            trace: The step.
            request: Whether channels go ``through_norms``, and ops whose channels stay (``stays``).
        """

    def groups(self) -> list[dict[str, Any]]:
        """The groups."""

    def stays(self) -> list[dict[str, Any]]:
        """What stays, and why."""

    def deviation(self, removed: Sequence[Sequence[int]], again: Trace) -> int | None:
        """The first op of the forward that is not as meant in the step of the pruned model.

        Args:
            removed: For each group, the channels that are gone.
            again: The pruned model's step.
        """

@final
class Trace:
    """One recorded step, checked."""

    @staticmethod
    def from_json(json: bytes, second: bytes | None = None, batch: int = 0) -> Trace:
        """Make a trace from its JSON.

        Args:
            json: The trace as the engine's JSON.
            second: The same step at another batch size; adds the law of sizes and the couplings.
                Where the two do not align op for op, a note says so.
            batch: The batch size wanted, if it is neither; 0 for that of the first.

        Raises:
            CaptureError: The JSON is no valid trace.
        """

    def at_sizes(
        self, others: Sequence[Trace], sizes: Sequence[Sequence[int]], wanted: Sequence[int]
    ) -> Trace:
        """The step at other sizes of its input.

        Args:
            others: Other recordings of the same ops at other sizes.
            sizes: Those of the input in each of them and, last, in this.
            wanted: The sizes wanted.

        Raises:
            UsageError: They are not of one step at several sizes, or no law explains how it grows.
        """

    def mixed_items(self) -> str | None:
        """Why a forward does not treat the items of its batch apart; ``None`` where it does."""

    def op_names(self, way: Mapping[str, Any]) -> list[str] | None:
        """Names of the ops of the step in a way, in order; ``None`` where it was not captured."""

    def knows_other_sizes(self) -> bool:
        """Whether another recording told how the step grows with its batch."""

    def ways(self) -> list[dict[str, Any]]:
        """The ways worth a capture where all is allowed that needs no leave: in slices."""

    def with_piece(self, way: Mapping[str, Any], piece: bytes) -> Trace:
        """Add what ops take on a piece of the batch.

        Args:
            way: The way that was asked for, with its ``items``.
            piece: The trace of the step on them, as JSON.

        Returns:
            The trace, as it is where the step runs other ops there.
        """

    def with_alternatives(
        self,
        steps: Sequence[tuple[Mapping[str, Any], bytes, bytes | None]],
        refusals: Mapping[str, str],
    ) -> Trace:
        """Add captures of the step in other ways.

        Args:
            steps: For each a way, its trace as JSON, and the trace at another batch size if there
                is one.
            refusals: Why others were not captured: ``Refusals`` of the engine as JSON.

        Raises:
            CaptureError: A trace is not valid, or not of the same step.
        """

    @staticmethod
    def decode(data: bytes) -> Trace:
        """Read the bytes of a ``.memfit`` file.

        Raises:
            TraceFileError: The bytes are no whole, valid trace of a known schema.
        """

    def encode(self) -> bytes:
        """The trace as the bytes of a ``.memfit`` file."""

    def json(self) -> str:
        """The trace as JSON."""

    def text(self) -> str:
        """The trace as ``memfit show`` prints it."""

@final
class Snapshot:
    """A CUDA memory snapshot, as columns."""

    @staticmethod
    def decode(data: bytes) -> Snapshot:
        """Read a snapshot from the bytes of its pickle, gzip'ed or not; nothing in it is executed.

        Raises:
            SnapshotError: The bytes are no whole snapshot; the message says what they are.
        """

    @staticmethod
    def read(path: str | PathLike[str]) -> Snapshot:
        """Read a snapshot from a file, without holding the file.

        Raises:
            OSError: The file cannot be opened.
            SnapshotError: It is no whole snapshot; the message says what it is.
        """

    def json(self) -> str:
        """The snapshot as JSON, column by column; numbers are bytes and microseconds."""

    def explain(
        self,
        source: str,
        before: tuple[str, Snapshot] | None = None,
        steps: int | None = None,
        device_memory_bytes: int | None = None,
    ) -> dict[str, Any]:
        """Explain the snapshot.

        Args:
            source: Its name, for the report.
            before: An earlier snapshot of the same program, with its name.
            steps: Steps between the two.
            device_memory_bytes: Memory of the device.
        """

    def replay(
        self, source: str, settings: str, device_memory_bytes: int | None
    ) -> tuple[dict[str, Any], str]:
        """Run the requests again under other allocator settings: the document and the text.

        Args:
            source: Its name, for the report.
            settings: As in ``PYTORCH_CUDA_ALLOC_CONF``; empty for those worth trying.
            device_memory_bytes: Memory of the device.

        Raises:
            UsageError: A setting is unknown.
        """

@final
class Store:
    """Writes blocks of memory to a file without a name in a folder, and reads them back."""

    def __new__(
        cls,
        folder: str | PathLike[str],
        window_bytes: int,
        *,
        drop_cache: bool = False,
        allow_memory: bool = False,
    ) -> Store:
        """Open the file.

        Args:
            folder: Where; nothing is left there when the process ends, however it ends.
            window_bytes: Most bytes on their way out at a time; a larger block goes alone.
            drop_cache: Let go of the system's copies in memory as soon as they are on the disk.
            allow_memory: Accept a folder on tmpfs or ramfs.

        Raises:
            OffloadError: The folder cannot be used.
        """

    def write(self, source: tuple[int, int], owner: object) -> StoredBlock:
        """Send memory out in the background; waits while the window is full.

        Args:
            source: Its address and its bytes; nobody may write to them before the block settled.
            owner: What keeps it alive; the block holds it until the transfer ended.

        Raises:
            OffloadError: This process is a fork of the one that opened the store.
        """

    def statistics(self) -> dict[str, Any]:
        """What it did so far."""

@final
class Room:
    """Which of the parameters that are elsewhere are in memory; items are places in the sizes."""

    def __new__(cls, sizes: list[int], order: list[int], room_bytes: int, ahead_bytes: int) -> Room:
        """With nothing in it.

        Args:
            sizes: Bytes of each item.
            order: Items in the order in which a step uses them.
            room_bytes: Most bytes in memory.
            ahead_bytes: Most of those that are there before their use.
        """

    def admit(self, item: int) -> None:
        """Note that an item is in memory already, whoever brought it."""

    def trim(self) -> list[tuple[str, int]]:
        """What to ``evict`` so that what is there fits."""

    def need(self, items: list[int]) -> list[tuple[str, int]]:
        """What to do, in order, so that some items can be used at the same time.

        Returns:
            ``evict``, ``fetch``, ``ahead`` (begin to fetch) or ``await`` (wait for what began), and
            the item.
        """

@final
class StoredBlock:
    """A block of a store; dropping it forgets it, after the transfer under way."""

    def settle(self) -> None:
        """Wait until it is written, and let its owner go.

        Raises:
            OffloadError: The write failed; says so every time.
        """

    def fetch(self, target: tuple[int, int]) -> None:
        """Read it to memory, which is given as its address and its bytes.

        Raises:
            OffloadError: The write or the read failed, or the bytes are not those written.
        """

    def prefetch(self, target: tuple[int, int], owner: object) -> None:
        """Have it read to memory in the background, holding ``owner`` until :meth:`wait`.

        Raises:
            OffloadError: The write failed, or the block is being fetched ahead already.
        """

    def wait(self) -> None:
        """Wait for what is fetched ahead.

        Raises:
            OffloadError: The read failed, the bytes are not those written, or nothing is fetched.
        """

    def forget(self) -> None:
        """Wait for the transfer under way, and give the block's room in the file back."""

def shrink_numbers(wide: tuple[int, int], narrow: tuple[int, int], threads: int) -> None:
    """Write 32-bit floating-point numbers in 8 bits.

    Args:
        wide: Address of the numbers and their bytes.
        narrow: Where they go, with the bytes that they take there.
        threads: Most threads to use.

    Raises:
        UsageError: There is no memory, or the lengths do not go together.
    """

def expand_numbers(narrow: tuple[int, int], wide: tuple[int, int], threads: int) -> None:
    """Write numbers of 8 bits in 32; as :func:`shrink_numbers`.

    Args:
        narrow: Address of the numbers and their bytes.
        wide: Where they go, likewise.
        threads: Most threads to use.

    Raises:
        UsageError: As :func:`shrink_numbers`.
    """

def shrink_moment(is_second: bool, wide: tuple[int, int], held: tuple[int, int]) -> None:
    """Write a moment of an optimizer in 8 bits.

    Args:
        is_second: Whether it is a mean of squares.
        wide: Address of its 32-bit numbers and their bytes.
        held: Where codes and scales go, with the bytes that they take there.

    Raises:
        UsageError: There is no memory, or the lengths do not go together.
    """

def expand_moment(is_second: bool, held: tuple[int, int], wide: tuple[int, int]) -> None:
    """Write a moment of 8 bits in 32; as :func:`shrink_moment`.

    Args:
        is_second: Whether it is a mean of squares.
        held: Address of codes and scales and their bytes.
        wide: Where the numbers go, likewise.

    Raises:
        UsageError: As :func:`shrink_moment`.
    """

def update_by_adam(
    rule: Mapping[str, float | None],
    parameter: tuple[int, int],
    gradient: tuple[int, int],
    first: tuple[int, int],
    second: tuple[int, int],
    threads: int,
    lower: tuple[int, int] | None = None,
) -> None:
    """Update a parameter by Adam with moments in 8 bits, which are updated too.

    Args:
        rule: ``direction`` (1, or -1 to go uphill), ``penalty`` (of the parameter, added to the
            gradient), ``decay`` (the parameter is multiplied by it before), ``first_added``,
            ``second_stays`` and ``second_added`` (parts of moments and gradient), ``step`` (the
            learning rate over the first correction), ``root_correction`` (one over the root of the
            second), ``epsilon`` and ``seed`` (``None`` for numbers of 32 bits; for a ``bfloat16``
            it decides how each is rounded, up or down in proportion).
        parameter: Address and bytes of its numbers.
        gradient: Likewise, in the same order.
        first: Codes and scales of the first moment.
        second: Of the second.
        threads: Most threads to use; they change no bit.
        lower: The lower halves of a parameter in ``bfloat16`` where they are kept: what each number
            is off by, in its last of 32 bits. Nothing is rounded then.

    Raises:
        UsageError: As :func:`shrink_moment`.
    """

def update_by_momentum(
    rule: Mapping[str, float | None],
    parameter: tuple[int, int],
    gradient: tuple[int, int],
    held: tuple[int, int],
    threads: int,
    lower: tuple[int, int] | None = None,
) -> None:
    """Update a parameter by gradient descent with a momentum in 8 bits, which is updated too.

    Args:
        rule: ``direction`` and ``penalty`` as in :func:`update_by_adam`; ``stays`` and ``added``
            (parts of momentum and gradient), ``nesterov`` (part of the momentum that is added to
            the gradient; ``None`` where the momentum is the step), ``step`` and ``seed``.
        parameter: Address and bytes of its numbers.
        gradient: Likewise, in the same order.
        held: Codes and scales of the momentum.
        threads: Most threads to use; they change no bit.
        lower: As there.

    Raises:
        UsageError: As :func:`shrink_moment`.
    """

def predict(trace: Trace, request: Mapping[str, Any]) -> dict[str, Any]:
    """Predict a step.

    Raises:
        BudgetError: The request's budget cannot be read.
        UsageError: The trace cannot be scaled to the request's batch.
    """

def reserved_beside_model(trace: Trace) -> int | None:
    """What the caching allocator takes for a step beside the model; None where there is none."""

def evaluate(trace: Trace, request: Mapping[str, Any]) -> dict[str, Any]:
    """Evaluate a step under treatments chosen by hand; for tests of the executor.

    Raises:
        UsageError: The request is not of the shape it should be.
    """

def plan(
    trace: Trace,
    costs: Mapping[str, Any],
    request: Mapping[str, Any],
    time_limit: float | None = None,
    work_limit: float | None = None,
) -> dict[str, Any]:
    """Plan a step: in about so many seconds, or with the work of so many, if they are given.

    Raises:
        BudgetError: The request's budget cannot be read.
        UsageError: The costs are not those of the trace.
    """

def place(
    csv: bytes, capacity: int | None, alignment: int, threads: int, time_limit: float | None
) -> tuple[list[str], dict[str, Any]]:
    """Place the allocations of a CSV: the lowest placement, or any within ``capacity`` bytes.

    Returns:
        The ids, and the answer.

    Raises:
        UsageError: The CSV cannot be read, or the time limit is no number of seconds.
    """

def prediction_text(prediction: Mapping[str, Any]) -> str:
    """The text of a prediction."""

def oom_messages(text: bytes, source: str) -> tuple[dict[str, Any], str] | None:
    """What the OOM messages in a text decide: the document and the text; none where it holds none.

    Args:
        text: A log, or a message alone.
        source: Its name, for the report.
    """

def explanation_text(explanation: Mapping[str, Any]) -> str:
    """The text of an explanation."""

def track_text(json: str) -> str:
    """The text of a track's record, from its JSON."""

def broker_path() -> Path:
    """Where the broker listens, unless told otherwise."""

def bytes_text(count: int) -> str:
    """Bytes as the reports write them, ``1.5 GiB``."""

def techniques() -> list[str]:
    """The names of all techniques."""

def effect(action: Mapping[str, Any]) -> str:
    """What an action of a plan does, in the words of the reports."""

def schema() -> dict[str, Any]:
    """The JSON Schema of every answer."""

def verification(
    plan: Mapping[str, Any],
    measured: Mapping[str, Any] | None,
    compiled: bool,
    capture_seconds: float,
    plan_seconds: float,
) -> tuple[dict[str, Any], str]:
    """The document and the text of a verification.

    Args:
        plan: The eager plan.
        measured: What real steps gave; ``None`` where nothing ran.
        compiled: Whether it is of compiled steps.
        capture_seconds: Time the capture took.
        plan_seconds: Time the plan took.

    Raises:
        UsageError: What was measured is not of the shape it should be.
    """

def calibration(profile: Mapping[str, Any], path: str) -> tuple[dict[str, Any], str]:
    """The document and the text of a calibration whose profile was written to ``path``.

    Raises:
        UsageError: The profile is not of the shape it should be.
    """

def pruning(facts: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """The document and the text of a pruned model.

    Args:
        facts: The document but for its version.

    Raises:
        UsageError: The facts are not of the shape they should be.
    """

def plan_text(plan: Mapping[str, Any]) -> str:
    """The text of a plan."""

def front_text(front: Mapping[str, Any]) -> str:
    """The text of a front."""

def front_page(front: Mapping[str, Any], svg: bool = False) -> str:
    """The page of a front, or with ``svg`` the plot alone."""

def decode_plan(data: bytes) -> dict[str, Any]:
    """The plan that the bytes of a ``.memfit`` file hold.

    Raises:
        TraceFileError: The bytes are no whole plan of a known schema.
    """

def encode_plan(plan: Mapping[str, Any]) -> bytes:
    """A plan as the bytes of a ``.memfit`` file."""

def file_kind(data: bytes) -> Literal["trace", "plan"]:
    """What the bytes of a ``.memfit`` file hold.

    Raises:
        TraceFileError: They are none, or of a later schema.
    """

def half_of_free_host_bytes() -> int:
    """What parked copies may take of the host's memory unless it is said."""

def held_cuda_bytes(device: int) -> int:
    """What this process holds of a GPU in models that can be parked; torch does not count it."""

def context_bytes() -> int:
    """What a process takes on a GPU besides tensors, as predictions have it."""

def rooms() -> list[dict[str, Any]]:
    """The memories of this machine with what the broker still has of each.

    Raises:
        LeaseError: A broker is there and does not answer.
    """

def gpu_memory() -> list[tuple[str, int, int]]:
    """The GPUs that NVML sees, as device, total and used bytes; none where it cannot be used."""

def gpu_profile(name: str | None) -> dict[str, Any]:
    """A GPU's datasheet as a device profile; without a name, of the one that stands in.

    Raises:
        UsageError: No datasheet of such a GPU is known, or several are.
    """

def check_profile(profile: Mapping[str, Any]) -> None:
    """Check that a device profile can be used for costs.

    Raises:
        UsageError: It is not of that shape, or a number in it is not positive.
    """

def check_step_budget(text: str) -> None:
    """Check that a text is the budget of a step.

    Raises:
        BudgetError: It is no budget, or so little that another unit was meant.
    """

def parse_budget(text: str, unplanned_peak_bytes: int) -> int:
    """A budget as written, in bytes; a percentage is of ``unplanned_peak_bytes``.

    Raises:
        BudgetError: The text is no budget.
    """

def run(argv: Sequence[str], host: object) -> int:
    """Run the program with ``argv`` and return its exit code."""

def count_allocations() -> str | None:
    """Start to count what torch allocates on the CPU; again, check that the hooks are in place.

    Returns:
        Why that cannot be; ``None`` when it counts.
    """

def seed_blocks(blocks: Sequence[tuple[int, int]]) -> None:
    """Make blocks known that were handed out before counting began, as ``(address, bytes)``."""

def add_blocks(blocks: Sequence[tuple[int, int]]) -> None:
    """Count blocks from now on that are not torch's allocator's, as ``(address, bytes)``."""

def remove_blocks(addresses: Sequence[int]) -> None:
    """Count them no more."""

def label_blocks(addresses: Sequence[int], category: str, owner: int = 0) -> None:
    """Say what the blocks at these addresses hold, and for whom; unknown ones are passed over.

    Raises:
        UsageError: There is no such category.
    """

def label_gone_blocks(since: int, category: str, owner: int = 0) -> None:
    """Say the same of unnamed blocks that came with an event from ``since`` on and are gone.

    Raises:
        UsageError: There is no such category.
    """

def last_event() -> int:
    """Number of the last event: they count allocations and frees."""

def survivors(since: int, until: int, *, with_models: bool) -> list[tuple[int, int, int]]:
    """Live blocks that came with an event in ``[since, until)``, the oldest first.

    As ``(address, bytes, event)``, with or without those of models and optimizers.
    """

def instances(objects: list[Any], families: tuple[type, ...]) -> list[Any]:
    """Those of the objects whose class is one of the families or derived from one, in their order.

    No object is asked for its class, as ``isinstance`` would do.
    """

def on_alarm(look: Callable[[], None], obstacle: Callable[[], object]) -> None:
    """Say whom to call when the alarm rings, unless ``obstacle`` returns something.

    ``obstacle`` is a function of C. ``look`` is called on the main thread, as soon as Python runs
    there again.
    """

def set_alarm(
    above_bytes: int, later_above_bytes: int, later_seconds: float, later_from_event: int
) -> None:
    """Ring once, above so many live bytes; some time from now at fewer, or from an event on."""

def switch_alarm_off() -> None:
    """Ring no more."""

def alarm_event() -> int:
    """Number of the event that rang the alarm last; 0 where none has."""

def block_event(address: int) -> int:
    """Number of the event with which the block at an address came; 0 where it is not counted."""

def is_counted(address: int) -> bool:
    """Whether the block at an address is in the count."""

def mark_allocations(mark: int) -> None:
    """Set the number that peaks reached from now on carry."""

def counted_bytes() -> int:
    """Bytes of all live blocks."""

def refused_bytes() -> int:
    """Size of the last request that the system refused; 0 when it refused none."""

def uncounted_blocks() -> int:
    """Blocks missing from the count because no memory was left to write them down."""

def taken_bytes() -> int:
    """What all counted blocks take of the process's memory, in whole pages where they are large."""

def resident_bytes() -> int:
    """How much of all counted blocks is in memory, those that are kept included."""

def refusals() -> int:
    """How many requests were refused while a budget was on."""

def last_refusal() -> dict[str, Any] | None:
    """The last refusal: bytes requested and held, the budget, and the live blocks."""

def forget_refusal() -> None:
    """Let go of what is known of the last refusal."""

def release_kept() -> None:
    """Free the blocks that are kept for the next requests while a budget is on."""

def set_overflow(folder: str, limit_bytes: int, most_bytes: int) -> None:
    """Have large blocks in files where memory has no room for them.

    Args:
        folder: Where files are made; empty for no more of them.
        limit_bytes: What is live in memory at most, but for blocks below 256 KiB.
        most_bytes: What lies in files at most; beyond that, memory is taken.
    """

def overflow_peaks() -> tuple[int, int]:
    """Most bytes of such blocks at once since :func:`set_overflow` was last called.

    And the most that were live when one came, in memory and in files.
    """
