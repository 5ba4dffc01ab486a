"""What a patched directory says of its slots: amax of the last steps, scales, total counts."""

import math
from pathlib import Path

from torch import Tensor

from fp8patch import numerics
from fp8patch.checkpoint.sidecar import Sidecar, read_sidecar
from fp8patch.checkpoint.state import another_model, stored_plan
from fp8patch.checkpoint.tensors import StoredTensors, open_tensors
from fp8patch.errors import CheckpointError
from fp8patch.inspect.slots import SlotPoints
from fp8patch.numerics import FLUSHED, NON_FINITE, SATURATED, SEEN
from fp8patch.plan.model import Plan
from fp8patch.slots import ROLES, WEIGHT, SlotState, grad_is_e5m2, limit

__all__ = ["read_checkpoint"]

# What is read of a weight for its SQNR: enough for a figure that does not move by 0.1 dB.
_SAMPLED_BYTES = 16 << 20


def read_checkpoint(directory: Path, *, sqnr: bool = False) -> tuple[Plan, list[SlotPoints]]:
    """The plan and the slots of a patched directory.

    Args:
        directory: As `fp8patch convert` or `save` writes it. Its weights need not be there.
        sqnr: Read a part of each weight, and measure what its cast costs.

    Raises:
        CheckpointError: There is no sidecar, it is corrupt, or of another model than the weights.
    """
    sidecar = read_sidecar(directory)
    plan = stored_plan(sidecar)
    stored = _stored(directory)
    keys = {} if stored is None else _keys(sidecar, stored)
    if sqnr and not keys:
        raise CheckpointError(
            f"{directory}: holds no weights that an SQNR could be measured on. Give the folder "
            "that save_pretrained wrote them to, or leave it out."
        )
    followers: dict[str, list[str]] = {}
    for path, leader in sidecar.bank.siblings.items():
        followers.setdefault(leader, []).append(path)
    slots = []
    place = {decision.path: at for at, decision in enumerate(plan.decisions)}
    for (path, role), state in sorted(
        sidecar.state.items(), key=lambda item: (place[item[0][0]], item[0][1])
    ):
        measured = None
        if sqnr and stored is not None and role == WEIGHT and path in keys:
            measured = _sqnr(stored, keys[path], plan, path, state)
        shared = tuple(followers.get(path, ())) if ROLES[role] == "input" else ()
        slots.append(_slot(plan, path, role, state, shared, measured))
    return plan, slots


def _slot(
    plan: Plan, path: str, role: int, state: SlotState, shared: tuple[str, ...], sqnr: float | None
) -> SlotPoints:
    amax: list[float | None] = list(state.history.tolist())
    pending = float(state.amax)
    if pending:
        amax.append(pending if math.isfinite(pending) else None)
    counts = state.counts.tolist()
    recipe = plan.recipe_of(plan[path])
    return SlotPoints(
        path=path,
        role=ROLES[role],
        scaling=recipe.scaling,
        format="e5m2" if ROLES[role] == "grad_output" and grad_is_e5m2(recipe) else "e4m3",
        limit=limit(recipe, role),
        steps=(),
        amax=amax,
        scale=[float(state.scale)],
        saturated=[counts[SATURATED]],
        flushed=[counts[FLUSHED]],
        non_finite=[counts[NON_FINITE]],
        seen=[counts[SEEN]],
        shared_by=shared,
        sqnr=sqnr,
    )


# -- the weights beside it ------------------------------------------------------------------------


def _stored(directory: Path) -> StoredTensors | None:
    """The stored tensors of the directory; None where there are none, or none that are whole."""
    files = [*directory.glob("*.safetensors"), *directory.glob("*.bin")]
    if not any(file.name.startswith(("model", "pytorch_model")) for file in files):
        return None
    return open_tensors(directory)


def _keys(sidecar: Sidecar, stored: StoredTensors) -> dict[str, str]:
    """{path of a converted module: key of its stored weight}, by name alone.

    Raises:
        CheckpointError: A shape differs, or no weight of the sidecar's is there.
    """
    shapes = stored.shapes()
    endings: dict[str, str] = {}
    for key in shapes:
        parts = key.split(".")
        # A sidecar's paths may begin below the stored names, as `bert.encoder…` does, or above.
        endings.update((".".join(parts[at:]), key) for at in range(len(parts)))
    found: dict[str, str] = {}
    for path, saved in sidecar.fingerprint.items():
        name = f"{path}.weight" if path else "weight"
        below = [".".join(name.split(".")[at:]) for at in range(name.count("."))]
        stored_as = endings.get(name) or next((part for part in below if part in shapes), None)
        if stored_as is None:
            continue
        shape = str(list(shapes[stored_as]))
        if f" {shape} " not in saved:
            was = saved[saved.find("[") : saved.find("]") + 1]
            raise another_model(sidecar, f"{path} was {was}, and {stored_as} is stored as {shape}")
        found[path] = stored_as
    if sidecar.fingerprint and not found:
        raise another_model(
            sidecar,
            f"none of the {len(sidecar.fingerprint)} weights that it names is stored here "
            f"({min(sidecar.fingerprint)!r}, for one)",
        )
    return found


def _sqnr(stored: StoredTensors, key: str, plan: Plan, path: str, state: SlotState) -> float | None:
    """dB of the weight's cast, on its first rows up to 16 MB; None where it has no scale."""
    rows = _sample(stored, key)
    if rows is None:
        return None
    recipe = plan.recipe_of(plan[path])
    if recipe.scaling == "rowwise":
        if plan[path].kind == "conv1d":  # stored [K, N]: its rows are columns, which is no sample
            return None
        x_fp8, scale = numerics.quantize_rowwise(rows, numerics.E4M3, limit(recipe, WEIGHT))
    else:
        live = numerics.scale_from_amax(numerics.amax(rows), limit(recipe, WEIGHT))
        scale = state.scale if recipe.scaling == "delayed" and state.scale > 0 else live
        x_fp8 = numerics.quantize(rows, scale, numerics.E4M3)
    found = numerics.sqnr(rows, numerics.dequantize(x_fp8, scale.reciprocal()))
    return found if math.isfinite(found) else None


def _sample(stored: StoredTensors, key: str) -> Tensor | None:
    piece = next(iter(stored.pieces(key)), None)
    if piece is None or not piece.numel() or not piece.is_floating_point() or piece.dim() != 2:
        return None
    return piece[: max(1, _SAMPLED_BYTES // max(piece[:1].nbytes, 1))].detach()
