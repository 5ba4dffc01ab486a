"""`fp8patch inspect`: what the FP8 numbers of a run, or of a checkpoint, say."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from fp8patch.inspect.slots import Layer, SlotPoints
    from fp8patch.inspect.source import Source

__all__ = ["inspect"]


def inspect(
    sources: Annotated[
        list[Path],
        typer.Argument(
            metavar="REPORT|DIR [OTHER]",
            help="File of `train --report`, or a patched folder; two of them are compared.",
            show_default=False,
        ),
    ],
    layer: Annotated[
        list[str] | None, typer.Option(help="Every slot of the layers that match. Repeatable.")
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="All layers, not the worst alone.")] = False,
    sqnr: Annotated[
        bool, typer.Option("--sqnr", help="Read a folder's weights, and measure their casts in dB.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Every figure as JSON.")] = False,
) -> None:
    """Layers by risk, worst first: clipped, flushed to zero, scales that were off.

    Names the layers where FP8 loses too much, and prints the lines of a recipe that help.
    """
    if len(sources) > 2:
        raise typer.BadParameter(f"{len(sources)} sources: give one, or two to compare.")

    from fp8patch.inspect.slots import layers_of
    from fp8patch.inspect.source import read_source

    read = [read_source(path, sqnr=sqnr) for path in sources]
    found = [_chosen(layers_of(source.slots), layer or []) for source in read]

    from fp8patch.cli import inspect_view, output

    if as_json:
        output.print_json(_json(read, found))
    elif len(read) == 2:
        inspect_view.show_both(read, found, output.console(), every=every or bool(layer))
    elif layer:
        inspect_view.show_slots(read[0], found[0], output.console())
    else:
        inspect_view.show(read[0], found[0], output.console(), every=every)


def _chosen(layers: "list[Layer]", patterns: list[str]) -> "list[Layer]":
    """Those that a pattern matches, as in `plan`: "model.layers.0" is all of block 0."""
    from fp8patch.errors import PlanError
    from fp8patch.plan.patterns import matches

    for pattern in patterns:
        if not any(matches(pattern, [layer.path]) for layer in layers):
            example = f', such as "{layers[0].path}"' if layers else ""
            raise PlanError(
                f"--layer {pattern}: matches none of the {len(layers)} layers. Use a glob over "
                f"module paths{example}."
            )
    wanted = [at for at in layers if any(matches(p, [at.path]) for p in patterns)]
    return wanted if patterns else layers


def _json(sources: "list[Source]", layers: "list[list[Layer]]") -> dict[str, Any]:
    from fp8patch.inspect.advice import advise, overrides

    entries = []
    for source, found in zip(sources, layers, strict=True):
        advice = advise(found)
        entries.append(
            {
                "path": str(source.path),
                "kind": source.kind,
                "models": list(source.models),
                "recipe": source.recipe,
                "layers": [
                    {
                        "path": layer.path,
                        "severity": layer.severity,
                        "slots": [_slot(slot) for slot in layer.slots],
                    }
                    for layer in found
                ],
                "advice": [{**asdict(each), "also": list(each.also)} for each in advice],
                "overrides": {
                    pattern: dict(line.split(": ") for line in lines)
                    for pattern, lines in overrides(advice, [s.path for s in source.slots]).items()
                },
            }
        )
    return {"sources": entries}


def _slot(slot: "SlotPoints") -> dict[str, Any]:
    return {
        "role": slot.role,
        "scaling": slot.scaling,
        "format": slot.format,
        "severity": slot.severity,
        **{
            name: {
                "whole": ratio.whole,
                "recent": ratio.recent,
                "worst": ratio.worst,
                "worst_step": ratio.step,
            }
            for name, ratio in slot.ratios.items()
        },
        "fill_log2": slot.fill,
        "sqnr_db": slot.sqnr,
        "steps": list(slot.steps),
        "amax": list(slot.amax),
        "scale": list(slot.scale),
        "shared_by": list(slot.shared_by),
    }
