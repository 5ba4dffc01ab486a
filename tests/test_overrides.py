"""Overrides of single layers: each computes as if the whole model had its recipe."""

import copy
import dataclasses
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from directories import run, write
from torch import Tensor, nn

import fp8patch
from fp8patch import regions
from fp8patch.errors import PlanError, RecipeError
from fp8patch.plan.model import Plan, plan_model
from fp8patch.recipe import Recipe
from fp8patch.slots import INPUT, ROLES, WEIGHT

D = 32
SHORT = {"amax_history_len": 3, "margin": 1}
LAYERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "short": SHORT,
    "newest": {"amax_compute_algo": "most_recent"},
    "current": {"scaling": "current"},
    "rowwise": {"scaling": "rowwise", "fp8_format": "e4m3"},
    "e4m3": {"fp8_format": "e4m3"},
    "bf16_wgrad": {"wgrad": "bf16", "amax_history_len": 5},
}
BASE = Recipe(name="base", amax_history_len=8)
MIXED = BASE.replace(name="mixed", overrides={f"{n}": f for n, f in LAYERS.items() if f})


class Parallel(nn.Module):
    """One Linear a recipe, side by side: none reads what another has made."""

    def __init__(self) -> None:
        super().__init__()
        for name in LAYERS:
            self.add_module(name, nn.Linear(D, 64))

    def forward(self, x: Tensor) -> list[Tensor]:
        # Each gets a tensor of its own, so that they are no siblings.
        return [layer(x.clone()) for layer in self.children()]


def build(recipe: Recipe) -> Any:
    torch.manual_seed(0)
    return fp8patch.convert_model(Parallel(), recipe, include=("*",))


def train(model: Any, first: int, last: int) -> dict[str, list[Tensor]]:
    """{layer: its outputs and gradients}, of steps whose data grow and shrink."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    seen: dict[str, list[Tensor]] = {name: [] for name in LAYERS}
    for step in range(first, last):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(48, D, generator=generator) * 2.0 ** (step * 5 % 7)
        x.requires_grad_()
        with torch.autocast("cpu", torch.bfloat16), fp8patch.autocast(backend="emulate"):
            outputs = model(x)
        sum(y.float().square().mean() for y in outputs).backward()
        for name, y in zip(LAYERS, outputs, strict=True):
            seen[name] += [y.detach(), model.get_submodule(name).weight.grad.clone()]
        optimizer.step()
        optimizer.zero_grad()
    return seen


def slots(model: Any, name: str) -> list[Tensor]:
    bank = model._fp8_bank
    return [tensor for role in range(len(ROLES)) for tensor in bank.read(name, role)]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.fixture(scope="module")
def mixed() -> tuple[Any, dict[str, list[Tensor]]]:
    model = build(MIXED)
    return model, train(model, 0, 12)


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_computes_as_in_a_model_of_its_recipe(
    name: str, mixed: tuple[Any, dict[str, list[Tensor]]]
) -> None:
    fields = LAYERS[name]
    base = Recipe() if "scaling" in fields else BASE  # which keeps no history
    alone = build(base.replace(**fields))
    seen = train(alone, 0, 12)
    assert same(mixed[1][name], seen[name])
    # The most recent of a history is all that its layer keeps, where others keep more.
    if name != "newest":
        assert same(slots(mixed[0], name), slots(alone, name))
    else:
        ours, theirs = (
            [model._fp8_bank.read(name, role).scale for role in range(3)]
            for model in (mixed[0], alone)
        )
        assert same(ours, theirs)


def test_the_layers_do_differ(mixed: tuple[Any, dict[str, list[Tensor]]]) -> None:
    """Or the test above would compare a recipe that nobody applies with itself."""
    last = {name: seen[-2] for name, seen in mixed[1].items()}
    weight = {name: mixed[0].get_submodule(name).weight for name in LAYERS}
    assert len({tuple(y.flatten()[:50].tolist()) for y in last.values()}) == len(LAYERS)
    assert len(weight) == len(LAYERS)
    lengths = {name: len(mixed[0]._fp8_bank.read(name, INPUT).history) for name in LAYERS}
    expected = {"plain": 8, "short": 3, "newest": 1, "current": 1, "rowwise": 1}
    assert lengths == {"e4m3": 8, "bf16_wgrad": 5, **expected}


# -- what conversion makes of it ------------------------------------------------------------------


class Siblings(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        return self.q(x) + self.k(x) + self.v(x)  # type: ignore[no-any-return]


def step(model: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16), fp8patch.autocast(backend="emulate"):
        y: Tensor = model(x)
    y.float().square().mean().backward()
    return y.detach()


@pytest.mark.parametrize(
    ("fields", "shared"),
    [({"margin": 1}, False), ({"amax_history_len": 2}, False), ({"wgrad": "bf16"}, True)],
    ids=str,
)
def test_siblings_share_a_slot_only_where_it_means_the_same(
    fields: dict[str, Any], shared: bool
) -> None:
    recipe = Recipe(overrides={"k": fields})
    model: Any = fp8patch.convert_model(Siblings(), recipe, include=("*",))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        step(model, torch.ones(16, D))
        optimizer.step()
    assert model.v._fp8_input_slot is model.q._fp8_input_slot
    assert (model.k._fp8_input_slot is model.q._fp8_input_slot) is shared


def test_a_layer_kept_in_bf16_is_not_converted() -> None:
    bf16 = dict.fromkeys(("fprop", "dgrad", "wgrad"), "bf16")
    plan = plan_model(Siblings(), Recipe(overrides={"k": bf16}), include=("*",), gpu=None)
    assert (plan["k"].action, plan["k"].code) == ("skip", "pattern")
    assert plan["k"].reason == 'kept in BF16 by the override "k"'
    model = fp8patch.convert_model(Siblings(), plan)
    assert type(model.k) is nn.Linear
    assert isinstance(model.q, fp8patch.Float8Linear)


def test_fp8_for_some_layers_only() -> None:
    """The recipe in BF16, and an override that turns FP8 on."""
    off = dict.fromkeys(("fprop", "dgrad", "wgrad"), "bf16")
    on = dict.fromkeys(off, "fp8")
    plan = plan_model(Siblings(), Recipe(**off, overrides={"q": on}), include=("*",), gpu=None)
    assert [d.path for d in plan.converted()] == ["q"]
    assert plan["v"].reason == "kept in BF16 by the recipe"


def test_a_repr_says_so() -> None:
    recipe = MIXED.replace(overrides={"k": SHORT})
    model = fp8patch.convert_model(Siblings(), recipe, include=("*",))
    assert repr(model.q).endswith("recipe=mixed)")
    assert repr(model.k).endswith("recipe=mixed with overrides)")


# -- copies, directories, regions -----------------------------------------------------------------


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_a_copy_goes_on_as_the_original(how: str) -> None:
    model = build(MIXED)
    train(model, 0, 5)
    twin = copy.deepcopy(model) if how == "deepcopy" else pickle.loads(pickle.dumps(model))
    seen, again = train(model, 5, 9), train(twin, 5, 9)
    for name in LAYERS:
        assert same(seen[name], again[name]), name
        assert same(slots(model, name), slots(twin, name)), name


def test_a_saved_model_goes_on_as_the_original(tmp_path: Path) -> None:
    model = build(MIXED)
    train(model, 0, 5)
    fp8patch.save(model, tmp_path / "saved")
    stored = json.loads((tmp_path / "saved" / "fp8patch.json").read_text())
    assert stored["plan"]["recipe"]["overrides"]["short"] == SHORT
    loaded = fp8patch.load(tmp_path / "saved", model=Parallel())
    assert loaded._fp8_plan.recipe == MIXED
    seen, again = train(model, 5, 9), train(loaded, 5, 9)
    for name in LAYERS:
        assert same(seen[name], again[name]), name
        assert same(slots(model, name), slots(loaded, name)), name


def test_layers_with_other_overrides_start_anew(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = build(MIXED)
    train(model, 0, 4)
    fp8patch.save(model, tmp_path / "saved")
    other = MIXED.replace(overrides={**MIXED.to_dict()["overrides"], "plain": {"margin": 2}})
    loaded = fp8patch.load(tmp_path / "saved", model=build(other))
    assert "1 layers had other overrides (plain, for one)" in capsys.readouterr().err
    assert float(loaded._fp8_bank.read("plain", WEIGHT).scale) == 0
    assert same(slots(loaded, "short"), slots(model, "short"))


def test_a_region_does_not_undo_what_is_said_of_one_layer() -> None:
    model = build(MIXED)
    bf16 = MIXED.replace(wgrad="bf16", fprop="bf16", dgrad="bf16", overrides={})
    x = torch.randn(16, D)
    with torch.autocast("cpu", torch.bfloat16):
        stock = model(x)
        with fp8patch.autocast(backend="emulate", recipe=bf16):
            seen = dict(zip(LAYERS, zip(model(x), stock, strict=True), strict=True))
    assert torch.equal(*seen["plain"])
    assert not torch.equal(*seen["short"])


def test_a_region_with_other_overrides_is_refused() -> None:
    model = build(MIXED)
    other = MIXED.replace(overrides={"plain": {"wgrad": "bf16"}})
    with (
        torch.autocast("cpu", torch.bfloat16),
        fp8patch.autocast(backend="emulate", recipe=other),
        pytest.raises(RecipeError, match="overrides that the model was not converted with"),
    ):
        model(torch.randn(16, D))


def test_a_gpu_without_rowwise_leaves_out_that_layer(capsys: pytest.CaptureFixture[str]) -> None:
    """Ada: FP8 with one scale a tensor, and none a row."""
    model = build(MIXED)
    x = torch.randn(16, D)
    with torch.autocast("cpu", torch.bfloat16):
        stock = model(x)
        with fp8patch.autocast(backend="emulate"):
            region = regions.active()
            assert region is not None
            regions.set_region(dataclasses.replace(region, rowwise=False))
            seen = dict(zip(LAYERS, zip(model(x), stock, strict=True), strict=True))
            regions.set_region(region)
    assert torch.equal(*seen["rowwise"])
    assert not torch.equal(*seen["short"])
    said = capsys.readouterr().err
    assert "rowwise runs in its own precision: the recipe's override asks for rowwise" in said
    assert "FP8 is off" not in said


# -- plans ----------------------------------------------------------------------------------------


def plan_of(overrides: dict[str, Any], **options: Any) -> Plan:
    return plan_model(Parallel(), BASE.replace(overrides=overrides), include=("*",), **options)


def test_a_plan_names_patterns_and_survives_json() -> None:
    plan = plan_of({"s*": SHORT, "short": {"wgrad": "bf16"}, "rowwise": LAYERS["rowwise"]})
    assert plan["short"].overrides == ("s*", "short")
    assert plan["plain"].overrides == ()
    assert plan["short"].reason == (
        'runs in FP8, with amax_history_len: 3, margin: 1, wgrad: bf16 (override "s*" and "short")'
    )
    short = plan.recipe_of(plan["short"])
    assert (short.margin, short.wgrad, short.amax_history_len) == (1, "bf16", 3)
    again = Plan.from_dict(json.loads(json.dumps(plan.to_dict())))
    assert again == plan
    assert again.recipe_of(again["short"]) is short
    assert "overrides" not in plan.to_dict()["decisions"][0]


def test_gains_are_those_of_the_layers_recipe() -> None:
    plan = plan_of({"short": {"scaling": "rowwise"}}, gpu="h100")
    every = plan_model(Parallel(), Recipe(scaling="rowwise"), gpu="h100")
    assert plan["short"].gain == every["short"].gain
    assert plan["plain"].gain != every["plain"].gain
    least = plan_model(
        Parallel(), BASE.replace(overrides={"short": {"scaling": "rowwise"}}),
        gpu="h100", min_gain=(plan["short"].gain + plan["plain"].gain) / 2,
    )  # fmt: skip
    assert (least["short"].code, least["plain"].code) == ("slower", "ok")


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda d: d.update(overrides=["nowhere"]), "has an override 'nowhere'"),
        (lambda d: d.update(overrides="short"), "not a list of patterns"),
        (lambda d: d.update(overrides=[3]), "not a list of patterns"),
    ],
)
def test_an_edited_plan_is_refused(spoil: Any, words: str) -> None:
    values = json.loads(json.dumps(plan_of({"short": SHORT}).to_dict()))
    spoil(next(d for d in values["decisions"] if d["path"] == "short"))
    with pytest.raises(PlanError, match=words):
        Plan.from_dict(values)


class WithNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up_proj = nn.LayerNorm(D), nn.Linear(D, D)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"*.upp_proj": SHORT}, 'matches none of the 2 candidates. Nearest: "*.up_proj"'),
        ({"norm": SHORT}, 'override pattern "norm" chooses no Linear and no Conv1D: norm is a Lay'),
        (
            {"*": {"margin": 1}, "up_proj": {"scaling": "current"}},
            "up_proj: overrides: '*' with 'up_proj': margin: 1 has no meaning with scaling: curre",
        ),
    ],
)
def test_overrides_that_do_nothing_or_make_no_sense(overrides: Any, words: str) -> None:
    with pytest.raises((PlanError, RecipeError)) as caught:
        plan_model(WithNorm(), Recipe(overrides=overrides))
    assert words in str(caught.value)


# -- commands -------------------------------------------------------------------------------------


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    file = tmp_path / "mine.yaml"
    file.write_text(
        'base: delayed\noverrides:\n  "*.down_proj": {margin: 2}\n'
        '  "*.layers.0": {fprop: bf16, dgrad: bf16, wgrad: bf16}\n'
    )
    return file


def test_plan_shows_them(tmp_path: Path, mine: Path) -> None:
    model = write(tmp_path / "model", "llama")
    result = run("plan", model, "--recipe", mine, "--min-gain", 0)
    assert result.exit_code == 0, result.output
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert any(line.startswith("model.layers.1.mlp.down_proj") and line.endswith("FP8 override")
               for line in lines)  # fmt: skip
    assert 'override "*.down_proj" (2, 1 in FP8): margin: 2' in lines
    assert 'pattern (7): kept in BF16 by the override "*.layers.0"' in lines


def test_convert_scales_weights_by_their_layers_recipe(tmp_path: Path, mine: Path) -> None:
    model = write(tmp_path / "model", "llama")
    result = run("convert", model, "-o", tmp_path / "out", "--recipe", mine)
    assert result.exit_code == 0, result.output
    loaded = fp8patch.load(tmp_path / "out")
    for path, limit in (("down_proj", 112.0), ("up_proj", 448.0)):
        weight = loaded.get_submodule(f"model.layers.1.mlp.{path}").weight
        state = loaded._fp8_bank.read(f"model.layers.1.mlp.{path}", WEIGHT)
        assert float(state.scale) == pytest.approx(limit / float(weight.detach().abs().max()))
    assert type(loaded.model.layers[0].mlp.up_proj) is nn.Linear
