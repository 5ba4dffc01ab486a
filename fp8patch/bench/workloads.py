"""What is trained in a benchmark: a model, one batch, an optimizer, the same for every contender.

Named workloads have fixed shapes, so that figures of different days and machines compare; a model
directory or a config.json is trained with random weights, which take the same time as real ones.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

from fp8patch.bench.gpt import GptLayers
from fp8patch.checkpoint.skeleton import model_from_config
from fp8patch.errors import Fp8PatchError
from fp8patch.recipe_fields import nearest

__all__ = ["WORKLOADS", "Training", "Workload", "resolve"]

_LABELLED = 0.15
_IGNORED = -100


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One model and the shape of its batch.

    Attributes:
        name: Of a row in `WORKLOADS`, or the path or hub name that the user gave.
        batch: Sequences, or images, in a step.
        seq: Tokens in a sequence; for images what the model makes of one.
        unit: What is counted a second.
        optimizer: `adamw` is fused AdamW, `none` ends the step with the backward.
        autocast: BF16 autocast over FP32 weights; otherwise the weights are BF16 themselves.
        include: Patterns of heads and small layers that FP8 takes too, as in `plan_model`.
        source: What to build the model from, unless `name` says it.
    """

    name: str
    batch: int
    seq: int
    unit: Literal["tokens", "images"] = "tokens"
    optimizer: Literal["adamw", "sgd", "none"] = "adamw"
    autocast: bool = True
    include: tuple[str, ...] = ()
    source: str | None = None

    @property
    def tokens(self) -> int:
        """M of most GEMMs."""
        return self.batch * self.seq

    @property
    def per_step(self) -> int:
        """Units that one step trains on."""
        return self.batch if self.unit == "images" else self.tokens

    def model(self, device: str) -> nn.Module:
        """The model in training mode, from seed 0, with its weights on `device`."""
        torch.manual_seed(0)
        with torch.device(device):
            model: nn.Module = _BUILDERS[self.name]() if self.source is None else self._user_model()
        if not self.autocast:
            model.to(torch.bfloat16)
        return model.train()

    def _user_model(self) -> nn.Module:
        assert self.source is not None
        model: Any = model_from_config(self.source, torch.get_default_device())
        if hasattr(model, "config"):  # a cache would be built, and thrown away, every step
            model.config.use_cache = False
        whole: nn.Module = model.float()
        return whole

    def training(self, model: nn.Module, device: str) -> "Training":
        """Batch and loss for `model`.

        Raises:
            Fp8PatchError: The model takes neither token ids nor images.
        """
        # On the CPU: the same batch wherever it goes, the meta device included.
        generator = torch.Generator().manual_seed(1)
        if isinstance(model, GptLayers):
            return _gpt_training(self, model, device, generator)
        if not hasattr(model, "config"):
            return _image_training(self, model, device, generator)
        return _hf_training(self, model, device, generator)

    def to_dict(self) -> dict[str, Any]:
        """JSON-safe; `from_dict` gives an equal workload back."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        return cls(**{**values, "include": tuple(values["include"])})


@dataclass(slots=True)
class Training:
    """How to run `forward`, and the gradient its result is given (None: it is a loss)."""

    forward: Callable[[], Tensor]
    gradient: Tensor | None = None

    def backward(self, result: Tensor) -> None:
        result.backward(self.gradient)


def resolve(name: str, *, batch: int | None = None, seq: int | None = None) -> Workload:
    """The named workload, or the one that trains the model at this path; sizes as given.

    A directory of that name goes before a named workload.
    """
    if name in WORKLOADS and not Path(name).exists():
        found = WORKLOADS[name]
        if seq is not None and found.unit == "images":
            raise Fp8PatchError(
                f"--seq {seq}: {name} has {found.seq} tokens an image. Leave it out; --batch works."
            )
    else:
        # (Much alike: the hub has a bert-base-uncased.)
        like = nearest(name, tuple(WORKLOADS), cutoff=0.85)
        if like and not Path(name).exists():
            raise Fp8PatchError(
                f"{name}: no such workload or directory.{like} Workloads: {', '.join(WORKLOADS)}."
            )
        found = Workload(name=name, batch=8, seq=512, source=name)
    return replace(found, batch=batch or found.batch, seq=seq or found.seq)


def _hf_training(
    workload: Workload, model: Any, device: str, generator: torch.Generator
) -> Training:
    config = model.config
    if model.main_input_name == "pixel_values":
        return _hf_image_training(workload, model, device, generator)
    if model.main_input_name != "input_ids":
        raise Fp8PatchError(
            f"{workload.name}: {type(model).__name__} takes {model.main_input_name}. The bench "
            "makes batches of token ids (input_ids) and of images (pixel_values)."
        )
    text = config.get_text_config()
    limit = getattr(text, "max_position_embeddings", None) or workload.seq
    if workload.seq > limit:
        raise Fp8PatchError(
            f"--seq {workload.seq}: {workload.name} has {limit} positions. Use --seq {limit} or "
            "less."
        )
    shape = (workload.batch, workload.seq)

    def draw(high: int, shape: tuple[int, ...]) -> Tensor:
        return torch.randint(0, high, shape, generator=generator).to(device)

    ids = draw(text.vocab_size, shape)
    batch = {"input_ids": ids}
    kind = type(model).__name__
    if kind.endswith("ForMaskedLM"):
        masked = torch.rand(shape, generator=generator).to(device) < _LABELLED
        batch["labels"] = ids.masked_fill(~masked, _IGNORED)
    elif kind.endswith(("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")):
        batch["labels"] = ids
    elif kind.endswith("ForSequenceClassification"):
        batch["labels"] = draw(config.num_labels, (workload.batch,))
    elif kind.endswith("ForTokenClassification"):
        batch["labels"] = draw(config.num_labels, shape)
    elif getattr(config, "is_encoder_decoder", False):
        batch["decoder_input_ids"] = ids
    return Training(lambda: _loss(model(**batch)))


def _hf_image_training(
    workload: Workload, model: Any, device: str, generator: torch.Generator
) -> Training:
    config = model.config
    size = getattr(config, "image_size", 224)
    height, width = (size, size) if isinstance(size, int) else size
    shape = (workload.batch, getattr(config, "num_channels", 3), height, width)
    batch = {"pixel_values": torch.randn(shape, generator=generator).to(device)}
    if type(model).__name__.endswith("ForImageClassification"):
        high = config.num_labels
        batch["labels"] = torch.randint(0, high, (workload.batch,), generator=generator).to(device)
    return Training(lambda: _loss(model(**batch)))


def _loss(output: Any) -> Tensor:
    loss: Tensor | None = getattr(output, "loss", None)
    # A base model has none: any scalar will do that every output has a part in.
    return output[0].float().square().mean() if loss is None else loss


def _image_training(
    workload: Workload, model: nn.Module, device: str, generator: torch.Generator
) -> Training:
    shape = (workload.batch, 3, 224, 224)
    images = torch.randn(shape, generator=generator).to(device)
    labels = torch.randint(0, 1000, (workload.batch,), generator=generator).to(device)
    return Training(lambda: nn.functional.cross_entropy(model(images), labels))


def _gpt_training(
    workload: Workload, model: GptLayers, device: str, generator: torch.Generator
) -> Training:
    # As the layers before and after would hand them over. Sequence first where the layer wants it.
    sizes = (workload.batch, workload.seq, model.width)
    shape = (sizes[1], sizes[0], sizes[2]) if model.sequence_first else sizes
    dtype = torch.float32 if workload.autocast else torch.bfloat16
    hidden = torch.randn(shape, generator=generator).to(device, dtype)
    gradient = torch.randn(shape, generator=generator).to(device, dtype)
    return Training(lambda: model(hidden), gradient)


def _bert(**sizes: Any) -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    make: Any = BertConfig
    return BertForMaskedLM(make(**sizes, attn_implementation="sdpa"))


def _llama(**sizes: Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    make: Any = LlamaConfig
    config = make(**sizes, use_cache=False, attn_implementation="sdpa", tie_word_embeddings=False)
    return LlamaForCausalLM(config)


def _vit_huge() -> nn.Module:
    from timm.models.vision_transformer import VisionTransformer

    model: nn.Module = VisionTransformer(embed_dim=1280, depth=32, num_heads=16)
    return model


_BUILDERS: dict[str, Callable[[], nn.Module]] = {
    "bert-large": partial(
        _bert,
        vocab_size=28996,
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=24,
        num_attention_heads=16,
    ),
    "llama-8b-4l": partial(
        _llama,
        vocab_size=32000,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=4,
        num_attention_heads=32,
        num_key_value_heads=8,
    ),
    "gpt-4096": partial(GptLayers, layers=1, width=4096, inner=16384, heads=32),
    "bert-4096-4l": partial(
        _bert,
        vocab_size=1024,
        hidden_size=4096,
        intermediate_size=16384,
        num_hidden_layers=4,
        num_attention_heads=32,
        max_position_embeddings=2048,
    ),
    "vit-huge": _vit_huge,
    "bert-base": _bert,
    "tiny": partial(GptLayers, layers=2, width=32, inner=64, heads=2),
}


def _named(entries: Iterable[Workload]) -> dict[str, Workload]:
    return {entry.name: entry for entry in entries}


# `include`: all that is aligned, heads too, because that is what the peers convert.
WORKLOADS: dict[str, Workload] = _named(
    (
        Workload(name="bert-large", batch=24, seq=512, include=("*",)),
        Workload(name="llama-8b-4l", batch=4, seq=2048, include=("*",)),
        Workload(
            name="gpt-4096", batch=4, seq=2048, optimizer="none", autocast=False, include=("*",)
        ),
        Workload(name="bert-4096-4l", batch=4, seq=2048, include=("*",)),
        # 224 pixels in patches of 16, and the class token.
        Workload(
            name="vit-huge", batch=128, seq=197, unit="images", optimizer="sgd", include=("*",)
        ),
        Workload(name="bert-base", batch=32, seq=128, include=("*",)),
        # Not a measurement of anything: seconds on a CPU, to try the bench itself.
        Workload(name="tiny", batch=2, seq=16, include=("*",)),
    )
)
