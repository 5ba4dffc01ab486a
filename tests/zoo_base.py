"""What every entry of the model zoo shares: the entry itself, small seeded inputs, a loss.

Sizes are tiny (hidden 64, two layers), dimensions are multiples of 16 unless a family's trait is
otherwise, and token counts are odd on purpose: FP8 GEMMs want multiples of 16, scripts do not.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

VOCAB = 96
BATCH = 2
TOKENS = 13
IMAGE = 32

Inputs = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Entry:
    """One architecture: how to build it and what to feed it.

    `model` and `config` are class names in `transformers`, looked up only when built, so that
    importing the zoo imports no modelling file. `special` are keyword arguments of the config.
    """

    name: str
    model: str
    config: str
    make_inputs: Callable[[], Inputs]
    special: Mapping[str, Any]

    @property
    def model_class(self) -> Any:
        import transformers

        return getattr(transformers, self.model)

    def make_config(self) -> Any:
        import transformers

        config = getattr(transformers, self.config)(**self.special)
        silence(config, keep=self.special)
        return config

    def build(self, seed: int = 0) -> torch.nn.Module:
        """A fresh FP32 model on the CPU, in training mode, the same weights for the same seed."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model: torch.nn.Module = self.model_class(self.make_config())
        return model.float().train()

    def inputs(self, model: torch.nn.Module | None = None) -> Inputs:
        """Fresh tensors, the same for every call. `model` is accepted for symmetry, not needed."""
        return self.make_inputs()


def entry(
    name: str, model: str, config: str, make_inputs: Callable[[], Inputs], **special: Any
) -> Entry:
    return Entry(name, model, config, make_inputs, special)


def silence(config: Any, keep: Mapping[str, Any]) -> None:
    """Set dropout, layer drop, jitter and random masks of a config and its parts to 0."""
    for key, value in list(vars(config).items()):
        if hasattr(value, "to_dict") and hasattr(value, "model_type"):
            silence(value, keep)
        elif isinstance(value, float) and key not in keep and ("drop" in key or "jitter" in key):
            setattr(config, key, 0.0)
    for key in ("mask_time_prob", "mask_feature_prob"):
        if hasattr(config, key):
            setattr(config, key, 0.0)


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor in an output: ModelOutput, tuple, list or dict, in order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors(item)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors(item)


def loss(output: Any) -> torch.Tensor:
    """The model's own loss, else the mean square of its floating outputs: an FP32 scalar."""
    own = getattr(output, "loss", None)
    if own is not None:
        return own.float().sum()
    parts = [t.float().square().mean() for t in tensors(output) if t.requires_grad]
    return torch.stack(parts).mean()


def run(model: torch.nn.Module, inputs: Inputs) -> Any:
    """One forward from a fixed random state (PhiMoE's router draws numbers while training)."""
    torch.manual_seed(0)
    return model(**inputs)


def generator(seed: int = 1) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def ids(batch: int = BATCH, tokens: int = TOKENS, seed: int = 1, low: int = 5) -> torch.Tensor:
    """Token ids clear of the special ones (pad, bos, eos, mask are all below 5)."""
    return torch.randint(low, VOCAB, (batch, tokens), generator=generator(seed))


def noise(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=generator(seed))


def lm() -> Inputs:
    """Masked or causal language modelling: every position is predicted."""
    return {"input_ids": ids(), "labels": ids(seed=2)}


def lm_padded() -> Inputs:
    """Language modelling with a second row that is two tokens shorter."""
    mask = torch.ones(BATCH, TOKENS, dtype=torch.long)
    mask[1, -2:] = 0
    return {**lm(), "attention_mask": mask}


def same_class(*shape: int) -> torch.Tensor:
    """Class 1 everywhere, [BATCH] unless told: with different classes the gradients of untrained
    features, which are nearly alike, would cancel, and what is left would be rounding."""
    return torch.ones(shape or (BATCH,), dtype=torch.long)


def classify_text() -> Inputs:
    return {"input_ids": ids(), "labels": same_class()}


def seq2seq() -> Inputs:
    return {
        "input_ids": ids(),
        "decoder_input_ids": ids(tokens=7, seed=3),
        "labels": ids(tokens=7, seed=2),
    }


def image() -> Inputs:
    return {"pixel_values": noise(BATCH, 3, IMAGE, IMAGE)}


def classify_image() -> Inputs:
    return {**image(), "labels": same_class()}
