"""The memory that CUDA graphs of ours write: who records into it, and what of it is still held.

All graphs that are recorded in one step, forward and backward, are a session. The allocator lets
them share memory by what it saw held and let go while they were recorded. So a graph may be
replayed where whatever was let go by then has been let go again, and that is asked each time.
Sessions (of other batch shapes, of weights that moved) share one pool as well: at most one runs in
a step, and a step begins only when nothing of the last one is held by anybody.

What a replay hands out does not own its memory; how often its storage is held, which views share,
tells whether somebody still has it.
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from fp8patch import messages
from fp8patch.blocks import capture

__all__ = [
    "Graph",
    "Result",
    "Session",
    "Step",
    "abandon",
    "alive",
    "begin",
    "end_forward",
    "let_go",
    "new_session",
    "owned",
    "step",
    "viewed",
]

# Sessions that may be given up for one that has more of a step in it; after that, what is missing
# in a session runs without graphs. So many steps pay for one more.
_MOST_RENEWALS, _STEPS_A_RENEWAL = 16, 200
# How many there may be, and after how many steps one that did not run is given up.
_MOST_SESSIONS, _STALE = 128, 1000


class Result:
    """Where a graph writes one of its results, and who holds what lies there.

    Attributes:
        is_gradient: A backward's.
    """

    def __init__(self, tensor: Tensor, is_gradient: bool = False) -> None:
        storage = tensor.untyped_storage()
        self._described = {
            "nbytes": storage.nbytes(),
            "data_ptr": storage.data_ptr(),
            "size": tensor.shape,
            "stride": tensor.stride(),
            "dtype": tensor.dtype,
            "device": tensor.device,
            "storage_offset": tensor.storage_offset(),
        }
        self.address = tensor.data_ptr()
        self.storage: int = storage.data_ptr()
        self.is_gradient = is_gradient
        # While what was recorded is held; after that, a tensor that owns nothing, whose storage
        # is that of all that is handed out, and how many hold that storage when nobody else does.
        self._recorded: StorageWeakRef | None = None
        self._alias: Tensor | None = None
        self._storage: Any = None
        self._idle = 0

    def tensor(self) -> Tensor:
        """What lies here, without owning it."""
        if self._alias is None:
            self._alias = capture.alias(self._described)
            self._storage = self._alias.untyped_storage()
            self._idle = _holders(self._storage)
        return self._alias.detach()

    def hand_out(self, recorded: Tensor | None = None) -> Tensor:
        """What lies here, for somebody to hold.

        `recorded`: the tensor that the place was made of. It owns its memory, so that while the
        session is recorded, the allocator sees for how long it is held.
        """
        if _step.diverged and recorded is None:
            return self.tensor().clone()
        if recorded is None:
            found = self.tensor()
        else:
            found = recorded.detach()
            self._recorded = StorageWeakRef(found.untyped_storage())
        _step.given.append(self)
        if self._described["nbytes"]:
            _step.written[self.address] = self
        return found

    def version(self) -> int:
        """Of what was handed out: tells whether somebody has written to it."""
        return 0 if self._alias is None else self._alias._version

    def holders(self) -> int:
        """How many tensors hold what was handed out (1 at most, where it was just recorded)."""
        found = int(self._recorded is not None and not self._recorded.expired())
        return found + (0 if self._alias is None else _holders(self._storage) - self._idle)

    def is_free(self) -> bool:
        """Does nobody hold what was handed out?"""
        if self._recorded is not None:
            if not self._recorded.expired():
                return False
            self._recorded = None
        return self._alias is None or _holders(self._storage) <= self._idle


class Session:
    """What was recorded in one step.

    Attributes:
        dropped: None of it may be replayed any more.
        missed: A call of a later step was not in it.
        used: Number of the step in which it ran last.
        calls: How many its forward has.
        histories: What autograd keeps of forwards whose backward has yet to be recorded.
        freed: For each graph, places that were let go since the one before was recorded.
        held: While it is recorded: places that were not yet let go.
        kept: While it is recorded: gradients, which autograd takes in one step, and in another only
            adds up (to a parameter's `.grad`; to the gradient of a loss in the middle of a model).
    """

    def __init__(self) -> None:
        self.dropped = self.missed = False
        self.used = _steps
        self.calls = 0
        self.histories: list[list[Any]] = []
        self.freed: list[list[Result]] = []
        self.held: list[Result] = []
        self.kept: list[Tensor] = []


@dataclass(slots=True)
class Step:
    """What has run since nothing was held.

    Attributes:
        session: The one that runs, or is recorded.
        recording: It is recorded.
        plain: No graphs run in this step.
        diverged: Something of the session did not run, or something else did: what is held for how
            long is another matter now, so that what is handed out is copied.
        calls: How many calls of blocks ran as graphs.
        ran: Index of the graph that ran last.
        turns: How often each call of a block was made.
        written: {address: what was handed out there}.
        given: What was handed out.
        copies: {id of a tensor: (the tensor, its version, where it was copied to)}.
        filled: {id of where something was copied to: (the tensor, its version)}.
    """

    session: Session | None = None
    recording: bool = False
    plain: bool = False
    diverged: bool = False
    calls: int = 0
    ran: int = -1
    turns: dict[Any, int] = field(default_factory=dict)
    written: dict[int, Result] = field(default_factory=dict)
    given: list[Result] = field(default_factory=list)
    copies: dict[int, tuple[weakref.ref[Tensor], int, Tensor]] = field(default_factory=dict)
    filled: dict[int, tuple[weakref.ref[Tensor], int]] = field(default_factory=dict)


_step = Step()
_live: "weakref.WeakSet[Session]" = weakref.WeakSet()
_steps = 0
_renewals = 0


def step() -> Step:
    """The step that runs."""
    return _step


def begin() -> None:
    """Nothing of the last step is held: its memory may be written again."""
    global _step, _steps
    last = _step.session
    if last is not None:
        last.used = _steps
        if last.missed and _may_renew():
            _drop(last)
    _steps += 1
    _step = Step()


def _may_renew() -> bool:
    if _renewals < _MOST_RENEWALS + _steps // _STEPS_A_RENEWAL:
        return True
    messages.once(
        "renewals",
        "what blocks read, or which of them run, changes too often: what was not recorded runs "
        "compiled, without CUDA graphs.",
    )
    return False


def _drop(session: Session) -> None:
    global _renewals
    _renewals += 1
    session.dropped = True


def new_session() -> Session | None:
    """For a step that is recorded; None where that happens too often to pay."""
    for session in list(_live):
        session.dropped = session.dropped or _steps - session.used > _STALE
    if not _may_renew():
        return None
    if len(_live) >= _MOST_SESSIONS:
        messages.once(
            "sessions",
            f"CUDA graphs of {_MOST_SESSIONS} steps are kept, of other shapes or weights each: "
            "further ones run compiled, without.",
        )
        return None
    found = Session()
    _live.add(found)
    return found


def end_forward() -> None:
    """A model's forward ends; what comes now is backward."""
    session = _step.session
    if session is None:
        return
    if _step.recording:
        session.calls = _step.calls
    elif session.calls != _step.calls:
        _step.diverged = True


def abandon() -> None:
    """No backward is to come: what was recorded for one, and had none, is given up."""
    session = _step.session
    if session is not None and any(session.histories):
        _drop(session)
        for history in session.histories:
            history.clear()


def owned(tensor: Tensor) -> Tensor:
    """`tensor`, or a copy of it where its memory is that of graphs."""
    strided = type(tensor) is Tensor and tensor.layout is torch.strided
    if not strided or not _step.given:
        return tensor
    storage = tensor.untyped_storage().data_ptr()
    return tensor.clone() if any(place.storage == storage for place in _step.given) else tensor


def alive() -> set[int]:
    """Addresses of storages that graphs of this step have written and somebody still holds."""
    let_go()
    return {place.storage for place in _step.given if not place.is_free()}


def viewed() -> set[int]:
    """Of `alive`, what several tensors hold."""
    return {place.storage for place in _step.given if place.holders() > 1}


def let_go() -> None:
    """What was held for a session that is recorded, where nothing is to come any more."""
    if _step.session is not None:
        _step.session.kept.clear()


class Graph:
    """What a function launches, recorded; nothing of it has run yet.

    Attributes:
        results: Of the function; taken by whoever recorded it.
    """

    def __init__(self, function: Callable[[], Any], device: torch.device, session: Session) -> None:
        # What this graph may write, beside what the graphs before it may.
        freed = [place for place in session.held if place.is_free()]
        self._graph, self.results = capture.record(function, device)
        session.held = [place for place in session.held if place not in freed]
        session.freed.append(freed)
        self._session, self._index = session, len(session.freed) - 1

    def may_run(self) -> bool:
        """Is whatever it may write held by nobody, and not wanted any more?"""
        # What forwards save is let go in the order of recording, and in no other.
        if _step.ran >= self._index:
            return False
        # What the graph before may write was asked when that one ran.
        lists = self._session.freed[_step.ran + 1 : self._index + 1]
        return all(place.is_free() for freed in lists for place in freed)

    def replay(self) -> None:
        self._graph.replay()
        _step.ran = self._index


def _holders(storage: Any) -> int:
    """How many tensors and others hold a storage."""
    found: int = torch._C._storage_Use_Count(storage._cdata)
    return found
