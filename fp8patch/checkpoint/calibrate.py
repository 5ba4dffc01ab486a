"""Fill the scales of activations from texts, so that an evaluation in FP8 needs no warm-up."""

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fp8patch import amp, messages
from fp8patch.checkpoint.files import Progress
from fp8patch.checkpoint.state import find_converted
from fp8patch.errors import CheckpointError, ConversionError
from fp8patch.scaling import Bank
from fp8patch.slots import INPUT, WEIGHT

__all__ = ["calibrate", "load_tokenizer", "read_texts"]

# What a tokenizer's vocabulary goes by; transformers would make one out of nothing without it.
_VOCABULARIES = ("tokenizer*", "vocab*", "*.model", "*.tiktoken", "tekken.json")
# A tokenizer that knows no limit says 1e30.
_NO_LIMIT = 1_000_000


def read_texts(path: Path) -> list[str]:
    """The lines of a UTF-8 file, but blank ones.

    Raises:
        CheckpointError: It cannot be read, or has no line.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise CheckpointError(f"{path}: cannot be read: {reason}. One text a line.") from None
    texts = [line.strip() for line in lines if line.strip()]
    if not texts:
        raise CheckpointError(f"{path}: no text in it. Calibration wants one text a line.")
    return texts


def load_tokenizer(directory: Path) -> Any:
    """The tokenizer in a model directory.

    Raises:
        CheckpointError: There is none, or one that cannot be loaded.
    """
    from transformers import AutoTokenizer

    remedy = "Save the model's tokenizer there (tokenizer.save_pretrained), or do not calibrate."
    if not any(next(directory.glob(pattern), None) for pattern in _VOCABULARIES):
        raise CheckpointError(f"{directory}: no tokenizer in it to calibrate with. {remedy}")
    try:
        return AutoTokenizer.from_pretrained(
            directory, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # each kind of tokenizer fails in its own way
        raise CheckpointError(
            f"{directory}: its tokenizer cannot be loaded ({messages.one_line(error)})."
        ) from None


def calibrate(
    model: nn.Module,
    tokenizer: Any,
    texts: Sequence[str],
    *,
    execution: Literal["fp8", "emulate", "bf16"],
    batch: int = 8,
    max_length: int = 512,
    progress: Progress | None = None,
) -> None:
    """Run `texts` through a converted model, without gradients, under BF16 autocast.

    Afterwards the input slot of every module that ran is set; weights and gradients are as before.

    Args:
        execution: `fp8` or `emulate`, or `bf16` to look at a forward that stays in BF16.
        batch: Texts in a batch; 1 where the tokenizer can't pad.
        max_length: Tokens at which a text is cut, unless the model takes fewer.

    Raises:
        CheckpointError: The tokenizer is of another model.
        ConversionError: The model does not run on text.
    """
    converted = find_converted(model)
    assert converted is not None
    bank = converted.bank
    kept = {path: bank.read(path, WEIGHT) for path in bank.paths}
    tokenizer.truncation_side = "right"
    if getattr(tokenizer, "pad_token", None) is None:
        tokenizer.pad_token = tokenizer.eos_token
        batch = batch if tokenizer.pad_token is not None else 1
    length = _length(model, tokenizer, max_length)
    device = next(model.parameters()).device
    model.eval()
    with (
        torch.no_grad(),
        torch.autocast(device.type, torch.bfloat16),
        amp.autocast(backend=execution, calibrating=True),
    ):
        for start in range(0, len(texts), batch):
            group = list(texts[start : start + batch])
            tokens = tokenizer(
                group,
                return_tensors="pt",
                padding=len(group) > 1,
                truncation=True,
                max_length=length,
            )
            _forward(model, tokens, device)
            if progress is not None:
                progress("calibrate", start + len(group), len(texts))
    for path, state in kept.items():
        # Calibration has seen the weights too, once more than a first use does.
        if len(state.history):
            bank.write(path, WEIGHT, state)
    _report_idle(bank)


def _report_idle(bank: Bank) -> None:
    idle = [path for path in bank.paths if not len(bank.read(path, INPUT).history)]
    if idle:
        messages.note(
            f"{len(idle)} of {len(bank.paths)} converted modules did not run on these texts, or on "
            f"zeros ({', '.join(idle[:3])}{', …' * (len(idle) > 3)}): they warm up on first use."
        )


def _length(model: Any, tokenizer: Any, wanted: int) -> int:
    limits = [
        getattr(tokenizer, "model_max_length", None),
        getattr(getattr(model, "config", None), "max_position_embeddings", None),
    ]
    return min([wanted, *(int(n) for n in limits if n and 0 < n < _NO_LIMIT)])


def _forward(model: Any, tokens: Any, device: torch.device) -> None:
    ids: Tensor = tokens["input_ids"]
    if not ids.numel():
        return
    largest, rows = int(ids.max()), model.get_input_embeddings().weight.shape[0]
    if largest >= rows:
        raise CheckpointError(
            f"the tokenizer gives token {largest}, and the model has {rows} embeddings: the two "
            "are not of one model."
        )
    known = inspect.signature(model.forward).parameters
    inputs = {name: value.to(device) for name, value in tokens.items() if name in known}
    if getattr(model.config, "is_encoder_decoder", False):
        # The decoder wants a text too: the same one.
        inputs["decoder_input_ids"] = inputs["input_ids"]
    if "input_ids" not in inputs:
        raise ConversionError(
            f"{type(model).__name__} takes no text (no input_ids), so texts cannot calibrate it."
        )
    model(**inputs)
