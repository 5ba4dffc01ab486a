"""Traps of structure: ties, lists, subclasses, hooks, weight decay, resizing. See `trap_models`."""

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune, weight_norm
from transformers.trainer_pt_utils import get_parameter_names
from trap_models import (
    VOCAB,
    WIDTH,
    bert,
    blocks,
    converted,
    falls,
    fp8,
    llama,
    moved,
    naive_swap,
    noise,
    ran_in_fp8,
    scales,
    seeded,
    sgd,
    snapshot,
    step,
    tokens,
)

import fp8patch
from fp8patch import messages
from fp8patch.errors import ConversionError

SWAPS = (fp8patch.convert_model, naive_swap)


def ties(model: nn.Module) -> set[frozenset[str]]:
    groups: dict[int, set[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), set()).add(name)
    return {frozenset(group) for group in groups.values() if len(group) > 1}


def reasons(model: nn.Module) -> dict[str, str]:
    return {d.path: d.code for d in fp8patch.plan_model(model).decisions}


# -- ties and lists ------------------------------------------------------------------------------


def test_tied_heads_stay_tied() -> None:
    model = bert()
    before = ties(model)
    assert len(before) == 2  # the decoder's weight and its bias
    fp8patch.convert_model(model)
    assert ties(model) == before
    assert reasons(bert())["cls.predictions.decoder"] == "tied_head"
    step(model, tokens(), sgd(model))
    head, table = model.cls.predictions.decoder.weight, model.get_input_embeddings().weight
    assert head is table
    with falls():
        assert ties(naive_swap(bert())) == before


class ListedLayers(nn.Module):
    """As Mask2Former's mask embedder: registered by name, called through a Python list."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = [nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH)]
        for i, layer in enumerate(self.steps):
            self.add_module(str(i), layer)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.steps:
            x = layer(x)
        return x


def test_layers_in_a_plain_list_are_the_ones_that_run() -> None:
    def check(model: Any) -> None:
        optimizer, before = sgd(model), snapshot(model)
        step(model, noise(5, WIDTH), optimizer)
        assert ran_in_fp8(model, noise(5, WIDTH))
        assert moved(before, model) == set(before)

    model = fp8patch.convert_model(seeded(ListedLayers))
    assert set(converted(model)) == {"0", "2"}
    check(model)
    with falls():
        check(naive_swap(seeded(ListedLayers)))


def test_an_optimizer_built_before_moves_every_weight() -> None:
    def check(swap: Any) -> None:
        model = blocks()
        optimizer, before = sgd(model), snapshot(model)
        step(swap(model), noise(5, WIDTH), optimizer)
        assert moved(before, model) == set(before)

    check(fp8patch.convert_model)
    with falls():
        check(naive_swap)


def test_hooks_flags_and_attributes_are_kept() -> None:
    calls: list[str] = []

    def prepare(swap: Any) -> Any:
        model = blocks()
        layer = model.layers[0].up
        layer.weight.requires_grad_(False)
        layer.bias.my_mark = "here"
        layer.name_of_mine = "up"
        layer.register_forward_hook(lambda *_: calls.append("forward"))
        layer.register_full_backward_hook(lambda *_: calls.append("backward"))
        layer.eval()
        return swap(model)

    def check(model: Any) -> None:
        calls.clear()
        layer = model.layers[0].up
        assert not layer.weight.requires_grad
        assert layer.bias.my_mark == "here"
        assert layer.name_of_mine == "up"
        assert not layer.training
        before = snapshot(model)
        step(model, noise(5, WIDTH), sgd(model))
        assert calls == ["forward", "backward"]
        assert moved(before, model) == set(before) - {"layers.0.up.weight"}

    check(prepare(fp8patch.convert_model))
    with falls():
        check(prepare(naive_swap))


# -- what must be left alone ---------------------------------------------------------------------


class Router(nn.Linear):
    """A Linear by inheritance only, as Llama4Router: its forward returns a pair."""

    def forward(self, x: Tensor) -> Any:
        logits = super().forward(x)
        return logits.softmax(-1), logits


class ChannelsFirstNorm(nn.LayerNorm):
    """As ConvNextLayerNorm: normalises dimension 1."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.transpose(1, -1)).transpose(1, -1)


class WithSubclasses(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = Router(WIDTH, WIDTH)
        self.norm = ChannelsFirstNorm(WIDTH)
        self.body = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        weights, logits = self.mix(x)
        mixed = self.norm((weights * logits).transpose(-1, -2)).transpose(-1, -2)
        body: Tensor = self.body(mixed)
        return body


def test_subclasses_with_a_forward_of_their_own_are_left_alone() -> None:
    model = seeded(WithSubclasses)
    found = reasons(model)
    assert found == {"mix": "subclass", "norm": "subclass", "body": "ok"}
    fp8patch.convert_model(model)
    assert type(model.mix) is Router
    assert type(model.norm) is ChannelsFirstNorm
    step(model, noise(2, 5, WIDTH), sgd(model))
    with falls():
        step(naive_swap(seeded(WithSubclasses)), noise(2, 5, WIDTH), sgd(model))


def test_multihead_attention_is_left_alone() -> None:
    class Pooler(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
            self.mlp = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.mlp(self.attention(x, x, x)[0])
            return y

    model = seeded(Pooler)
    found = reasons(model)
    assert found["attention"] == "unsupported"
    assert found["attention.out_proj"] == "bypassed"
    fp8patch.convert_model(model)
    assert set(converted(model)) == {"mlp"}
    step(model, noise(2, 5, WIDTH), sgd(model))


def _old_weight_norm(layer: nn.Linear) -> None:
    with pytest.warns(FutureWarning):
        weight_norm(layer)


@pytest.mark.parametrize(
    "dress",
    [
        _old_weight_norm,
        parametrizations.weight_norm,
        parametrizations.spectral_norm,
        lambda layer: prune.l1_unstructured(layer, "weight", 0.5),
    ],
    ids=["weight_norm", "parametrized", "spectral", "pruned"],
)
def test_computed_weights_are_left_alone(dress: Any) -> None:
    model = blocks()
    dress(model.layers[0].up)
    assert reasons(model)["layers.0.up"] == "parametrized"
    cls = type(model.layers[0].up)
    fp8patch.convert_model(model)
    assert type(model.layers[0].up) is cls
    before = snapshot(model)
    step(model, noise(5, WIDTH), sgd(model))
    assert moved(before, model) == set(before)


def test_the_fast_path_of_transformer_encoders_reads_plain_weights() -> None:
    def make() -> nn.Module:
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 64, batch_first=True, dropout=0.0)
        return nn.TransformerEncoder(layer, 2)

    model, plain, x = seeded(make), seeded(make).eval(), noise(2, 5, WIDTH)
    fp8patch.convert_model(model)
    assert set(converted(model)) == {f"layers.{i}.linear{j}" for i in (0, 1) for j in (1, 2)}
    step(model, x, sgd(model, lr=0.0))
    model.eval()
    with torch.no_grad(), fp8():
        # In eval a layer is one fused kernel on `.weight`, whatever the class of its Linears: no
        # FP8, and right.
        assert torch.equal(model(x), plain(x))
    model.train()
    before = snapshot(model)
    step(model, x, sgd(model))
    assert moved(before, model) == set(before)


@pytest.mark.parametrize(
    ("module", "word"),
    [("transformer_engine.pytorch", "Transformer Engine"), ("torchao.float8.float8_linear", "ao")],
)
def test_layers_of_other_fp8_libraries_are_refused(module: str, word: str) -> None:
    cls = type("Linear", (nn.Linear,), {"__module__": module})
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), cls(WIDTH, WIDTH))
    with pytest.raises(ConversionError, match=word):
        fp8patch.convert_model(model)
    assert type(model[0]) is nn.Linear


def test_data_parallel_is_refused() -> None:
    model = nn.DataParallel(blocks())
    with pytest.raises(ConversionError, match="DistributedDataParallel"):
        fp8patch.convert_model(model)
    assert not converted(model)


# -- what looks at the model afterwards ----------------------------------------------------------


def test_weight_decay_groups_stay_the_same() -> None:
    def decayed(model: nn.Module) -> list[str]:
        return get_parameter_names(model, [nn.LayerNorm], ["bias", "layernorm", "rmsnorm"])

    config = transformers.GPT2Config(
        vocab_size=VOCAB, n_embd=WIDTH, n_layer=1, n_head=2, n_positions=32
    )
    model = transformers.GPT2LMHeadModel(config)
    before = decayed(model)
    assert not any("ln_" in name for name in before)
    fp8patch.convert_model(model)
    assert len(converted(model)) == 4
    assert decayed(model) == before


def test_weights_can_be_initialised_after_conversion() -> None:
    model = fp8patch.convert_model(bert())
    step(model, tokens(), sgd(model))
    for parameter in model.parameters():
        parameter.data.fill_(7.0)
    for module in model.modules():
        module.__dict__.pop("_is_hf_initialized", None)
    for parameter in model.parameters():
        parameter.__dict__.pop("_is_hf_initialized", None)
    model.init_weights()
    for path, layer in converted(model).items():
        assert float(layer.weight.detach().std()) == pytest.approx(0.02, rel=0.2), path
    assert ran_in_fp8(model, tokens())


def test_resizing_a_tied_head_takes_it_out_of_fp8(capsys: pytest.CaptureFixture[str]) -> None:
    model = fp8patch.convert_model(bert(), include=["cls.predictions.decoder"])
    head = model.cls.predictions.decoder
    optimizer = sgd(model)
    step(model, tokens(), optimizer)
    assert "cls.predictions.decoder" in scales(model)
    model.resize_token_embeddings(VOCAB + 5)
    assert model.cls.predictions.decoder is head
    assert head.weight is model.get_input_embeddings().weight
    messages._seen.discard(f"misaligned cls.predictions.decoder {VOCAB + 5} {WIDTH}")
    capsys.readouterr()
    optimizer = sgd(model)
    for _ in range(2):
        step(model, tokens(), optimizer)
    lines = [line for line in capsys.readouterr().err.splitlines() if "multiple of 16" in line]
    assert len(lines) == 1
    assert "cls.predictions.decoder: out_features=101" in lines[0]
    hidden = noise(3, WIDTH)
    with torch.no_grad():
        plain = head(hidden)
        with fp8():
            assert torch.equal(head(hidden), plain)


def test_resizing_an_untied_head_makes_a_plain_linear() -> None:
    model = fp8patch.convert_model(llama(), include=["lm_head"])
    step(model, tokens(), sgd(model))
    model.resize_token_embeddings(VOCAB + 5)
    assert type(model.lm_head) is nn.Linear
    assert set(converted(model)) == {
        f"model.layers.{i}.{name}"
        for i in range(2)
        for name in (
            *(f"self_attn.{part}_proj" for part in "qkvo"),
            *(f"mlp.{part}_proj" for part in ("gate", "up", "down")),
        )
    }
    before = snapshot(model)
    step(model, tokens(), sgd(model))
    assert moved(before, model) == set(before)
    step(model, tokens(), sgd(model))
