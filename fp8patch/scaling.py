"""The bank: all slots of one converted model, and when they move.

Everything moves once per optimizer step (steps.py), at the first training forward after it:
pending amax roll into the history, scales are set, stale weights are quantised again. All
micro-batches, several forwards before a backward, recomputation and an evaluation in between
therefore see the same scales.
"""

import dataclasses
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fp8patch import messages
from fp8patch.late import LateCasts
from fp8patch.observation import Observation
from fp8patch.optimizer_hook import tell_of_steps
from fp8patch.owners import Owners
from fp8patch.recipe import Recipe
from fp8patch.slots import GRAD_OUTPUT, INPUT, NEVER_SET, ROLES, WEIGHT, Rows, Slots, SlotState
from fp8patch.steps import StepClock


class Bank:
    """Scales and amax of the modules at `paths`, and of nothing else.

    The bank holds its modules weakly: a deep copy or a pickle of a module takes the bank's numbers
    along, not the model. Copies start with a bank of their own.
    """

    def __init__(
        self,
        recipe: Recipe,
        paths: Iterable[str],
        norms: Iterable[str] = (),
        layers: Mapping[str, Recipe] | None = None,
    ) -> None:
        """`layers` are the recipes of the paths whose own differs from `recipe` (its overrides)."""
        self.recipe = recipe
        self.layers = dict(layers or {})
        self.paths = tuple(paths)
        self.norms = tuple(norms)
        # {path: path of the sibling whose input slot it uses}
        self.siblings: dict[str, str] = {}
        # Norms that may write the autocast dtype, because only GEMMs read them.
        self.low_precision_norms: set[str] = set()
        # {path of a norm: path of the module that reads its output, or whose siblings do too}
        self.norm_readers: dict[str, str] = {}
        # Modules whose weight was observed since the last update: once is enough.
        self.weights_seen: set[str] = set()
        self.observed = False
        self.clock = StepClock()
        self._reset()

    def _reset(self) -> None:
        self._rows = {path: 3 * i for i, path in enumerate(self.paths)}
        self._members: dict[str, weakref.ref[nn.Module]] = {}
        self._norm_members: dict[str, weakref.ref[nn.Module]] = {}
        self._slots: dict[torch.device, Slots] = {}
        self._home: dict[str, torch.device] = {}
        self._saved: dict[tuple[str, int], SlotState] = {}
        # Counts how often modules were given slots.
        self.layout = 0
        self.owners = Owners()
        self.observation: Observation | None = None
        # Of modules/weight_batch.py: casts of many weights at once, by what they have in common.
        self.casts: dict[Any, Any] = {}
        # The last outermost entry (regions.py) that was seen; weights are checked once an entry.
        self.entry = -1
        self.late = LateCasts()
        # Scales move only where amax are reduced over a group: a call that one rank makes by itself
        # (of the module inside DDP) must neither wait for the others nor get ahead of them.
        self.collective = False
        # Told before scales move, and when all state was replaced: an `inject.history.History`.
        self.watcher: Any = None
        tell_of_steps(self)

    # -- copies ---------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        keep = ("recipe", "layers", "paths", "norms", "siblings", "low_precision_norms", "observed")
        state = {name: getattr(self, name) for name in (*keep, "weights_seen", "norm_readers")}
        state["clock"] = dataclasses.replace(self.clock, copied=True)
        return {**state, "slots": dict(self.state())}

    def __setstate__(self, state: dict[str, Any]) -> None:
        saved = state.pop("slots")
        self.__dict__.update(state)
        self._reset()
        self._saved = dict(saved)

    # -- modules and their slots ----------------------------------------------------------------

    def recipe_of(self, path: str) -> Recipe:
        """The recipe of the module at `path`: the bank's, or what its overrides made of it."""
        return self.layers.get(path, self.recipe)

    def can_share(self, path: str, other: str) -> bool:
        """Whether the modules at these paths can have one input slot."""
        return Slots.can_share(self.recipe_of(path), self.recipe_of(other))

    def _make_slots(self, device: torch.device) -> Slots:
        layers = {i: self.layers[path] for i, path in enumerate(self.paths) if path in self.layers}
        return Slots(3 * len(self.paths), self.recipe, device, layers)

    def bind(self, module: Any) -> None:
        """Give `module` the views of its slots, on the device of its weight."""
        path, device = module._fp8_path, module.weight.device
        base = self._rows[path]
        if self._home.get(path, device) != device:
            states = [self._slots[self._home[path]].read(base + role) for role in range(3)]
            self._saved.update({(path, role): state for role, state in enumerate(states)})
            self.casts.clear()  # They know addresses that it leaves, and keep memory there.
        slots = self._slots.get(device)
        if slots is None:
            slots = self._slots[device] = self._make_slots(device)
        self._home[path] = device
        for left in set(self._slots) - set(self._home.values()):
            del self._slots[left]
        self._members[path] = weakref.ref(module)
        wanted = [(path, role) for role in range(3)]
        leader = self.siblings.get(path, path)
        if leader not in self._home:
            # Its input slot is used from now on, so what was saved of it has to be there.
            wanted.append((leader, INPUT))
        for key in wanted:
            state = self._saved.pop(key, None)
            if state is not None:
                slots.write(self._rows[key[0]] + key[1], state)
        module._fp8_device = device
        self._hand_out(module, slots)

    def _hand_out(self, module: Any, slots: Slots) -> None:
        path = module._fp8_path
        leader = self._leader(path, slots.device)
        module._fp8_place, self.layout = None, self.layout + 1
        module._fp8_input_slot = slots[self._rows[leader] + INPUT]
        module._fp8_weight_slot = slots[self._rows[path] + WEIGHT]
        module._fp8_grad_slot = slots[self._rows[path] + GRAD_OUTPUT]

    def _leader(self, path: str, device: torch.device) -> str:
        leader = self.siblings.get(path, path)
        return leader if self._home.get(leader, device) == device else path

    def rows_of(self, module: Any) -> tuple[int, int, int]:
        """Of a module that is bound: its first row, that of its input, that of its grad_output."""
        first = self._rows[module._fp8_path]
        leader = self._leader(module._fp8_path, module._fp8_device)
        return first, self._rows[leader] + INPUT, first + GRAD_OUTPUT

    def rows_on(self, device: torch.device, start: int, stop: int) -> Rows:
        """Some rows of the slots on a device."""
        return self._slots[device].rows(start, stop)

    def adopt_norm(self, norm: Any) -> None:
        """Tell `norm` whether it may write the autocast dtype, now and whenever that changes."""
        self._norm_members[norm._fp8_path] = weakref.ref(norm)
        self.mark_norms()

    def mark_norms(self) -> None:
        """Set what a norm's forward reads (a set of paths could not be compiled once)."""
        for path, reference in self._norm_members.items():
            norm: Any = reference()
            if norm is not None:
                norm._fp8_ready, norm._fp8_reader = None, self.norm_readers.get(path)
                norm._fp8_narrow = self.recipe.norm_output == "bf16" or (
                    self.recipe.norm_output == "auto" and path in self.low_precision_norms
                )

    @property
    def all_bound(self) -> bool:
        """Was every module used (or prepared) by now?"""
        return len(self._members) == len(self.paths)

    def member(self, path: str) -> Any:
        """The module at `path`, or None as long as it was never bound."""
        return self._members.get(path, lambda: None)()

    def members(self) -> Iterator[Any]:
        """The modules that were bound and still exist."""
        for path, reference in list(self._members.items()):
            module: Any = reference()
            # A part of the model that was reverted has left the bank.
            if getattr(module, "_fp8_bank", None) is self:
                yield module
            else:
                del self._members[path]

    # -- state ----------------------------------------------------------------------------------

    def read(self, path: str, role: int) -> SlotState:
        """The state of one slot, as a copy on the CPU."""
        if (path, role) in self._saved:
            return self._saved[(path, role)]
        home = self._home_of(path, role)
        return NEVER_SET if home is None else self._slots[home].read(self._rows[path] + role)

    def _home_of(self, path: str, role: int) -> torch.device | None:
        home = self._home.get(path)
        if home is None and role == INPUT:
            # An unbound leader's slot lives where its siblings are.
            shared = (self._home.get(p) for p, leader in self.siblings.items() if leader == path)
            home = next((device for device in shared if device is not None), None)
        return home

    def numbers(self) -> Iterator[tuple[str, int, list[float]]]:
        """(path, role, [last amax, scale, *counts]) of every slot, in one read a device."""
        tables = [(rows, table.tolist()) for rows, table in self.tables()]
        read = {row: values[row] for rows, values in tables for row in rows}
        for path in self.paths:
            for role in range(len(ROLES)):
                owner = self.siblings.get(path, path) if role == INPUT else path
                state = self._saved.get((owner, role))
                if state is None and self._rows[owner] + role in read:
                    yield path, role, read[self._rows[owner] + role]
                else:
                    yield path, role, (state or NEVER_SET).numbers()

    def tables(self) -> list[tuple[list[int], Tensor]]:
        """(rows living there, `Slots.table`) a device; row 3 * i + role is that of `paths[i]`."""
        slots = [(p, role) for p in self.paths for role in range(len(ROLES))]
        homes = {self._rows[p] + role: self._home_of(p, role) for p, role in slots}
        return [
            ([row for row, home in homes.items() if home == device], on_device.table())
            for device, on_device in self._slots.items()
        ]

    def pending(self) -> list[Tensor]:
        """FP32 [S] a device: the amax observed since the last update."""
        return [slots.pending for slots in self._slots.values()]

    def write(self, path: str, role: int, state: SlotState) -> None:
        """Replace the state of one slot."""
        if path in self._home:
            self._slots[self._home[path]].write(self._rows[path] + role, state)
        else:
            self._saved[(path, role)] = state

    def state(self) -> Iterator[tuple[tuple[str, int], SlotState]]:
        """((path, role), SlotState) of every slot that ever saw something."""
        on_device = {device: slots.read_all() for device, slots in self._slots.items()}
        for path in self.paths:
            for role in range(len(ROLES)):
                device = None if (path, role) in self._saved else self._home_of(path, role)
                state = self._saved.get((path, role), NEVER_SET)
                if device is not None:
                    state = on_device[device][self._rows[path] + role]
                shared = role == INPUT and path in self.siblings
                if not shared and (len(state.history) or bool(state.counts.any())):
                    yield (path, role), state

    def restore(self, state: dict[tuple[str, int], SlotState]) -> None:
        """Replace the state of every slot; what `state` lacks becomes as new."""
        for path in self.paths:
            for role in range(len(ROLES)):
                self.write(path, role, state.get((path, role), NEVER_SET))
        self.mark_norms()
        self.weights_seen = {p for (p, role), s in state.items() if role == WEIGHT and s.amax > 0}
        for module in self.members():
            leader, slots = self.siblings.get(module._fp8_path), self._slots[module._fp8_device]
            if leader is not None and leader not in self._home and (leader, INPUT) in self._saved:
                slots.write(self._rows[leader] + INPUT, self._saved.pop((leader, INPUT)))
            module.outdate_weight()
            module._fp8_weight_state.replaced = False
            self._hand_out(module, slots)
        if self.watcher is not None:
            self.watcher.replaced()

    def forget(self, path: str) -> None:
        """Every slot of the module at `path` is as new: its next casts use the live amax."""
        for role in range(len(ROLES)):
            owner = self.siblings.get(path, path) if role == INPUT else path
            self.write(owner, role, NEVER_SET)
        self.weights_seen.discard(path)

    def settle(self) -> None:
        """Act on the first step if it is over: the next update would, a save can't wait for it."""
        if self.observation is not None and self.due:
            self._finish_observation(self.observation)

    # -- steps ----------------------------------------------------------------------------------

    def optimizer_stepped(self, optimizer: torch.optim.Optimizer, owned: set[int]) -> None:
        """`optimizer`, which holds the parameters with the ids `owned`, has stepped."""
        if self.owners.stepped(optimizer, owned, self.members()):
            self.clock.saw_step()

    @property
    def due(self) -> bool:
        """Has a step passed since the last update?"""
        self.clock.orphaned = self.owners.gone
        return self.clock.due

    def enter(self, entry: int, training: bool, group: Any = None) -> None:
        """An outermost forward begins (`entry` numbers them): move if a step has passed."""
        if self.entry == entry:
            return
        self.entry = entry
        self.late.begin(entry, training)
        if training and self.due and (group is not None or not self.collective):
            self.update(group)
        if training and not self.observed and self.observation is None:
            self.observation = Observation()
        # Here and not only in each module's forward: a compiled forward can't look.
        if members := list(self.members()):
            members[0].refresh_weights(members, training)
        self.late.end()

    def update(self, group: Any = None) -> None:
        """Roll, rescale, and act on what the first step showed."""
        if self.observation is not None:
            self._finish_observation(self.observation)
        self.group = group
        if group is not None:
            for slots in self._slots.values():
                slots.reduce(group)
        if self.watcher is not None:
            self.watcher.before_update(group)
        for slots in self._slots.values():
            slots.update()
        self._roll_saved()
        self.weights_seen.clear()
        self.clock.updated()

    def _roll_saved(self) -> None:
        """Update what is no module's yet: after a copy, a module is bound at its first use."""
        if not any(float(state.amax) > 0 for state in self._saved.values()):
            return
        slots = self._make_slots(torch.device("cpu"))
        for (path, role), state in self._saved.items():
            slots.write(self._rows[path] + role, state)
        slots.update()
        self._saved = {key: slots.read(self._rows[key[0]] + key[1]) for key in self._saved}

    def _finish_observation(self, observation: Observation) -> None:
        self.observation, self.observed = None, True
        self.siblings = {
            path: leader
            for path, leader in observation.siblings().items()
            if self._home[path] == self._home[leader] and self.can_share(path, leader)
        }
        for path, leader in self.siblings.items():
            rows = self._rows[path] + INPUT, self._rows[leader] + INPUT
            self._slots[self._home[path]].merge_pending(*rows)
        for module in self.members():
            self._hand_out(module, self._slots[module._fp8_device])
        self.low_precision_norms = observation.norms_feeding_gemms_only()
        self.norm_readers = observation.norm_readers(self.siblings)
        self.mark_norms()
        if idle := observation.never_ran(self.paths):
            messages.warn(idle)
