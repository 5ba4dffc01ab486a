"""Every error that fp8patch raises for something the user can put right.

Fp8PatchError
├── RecipeError       a recipe, or a field of one, that does not exist or makes no sense
├── HardwareError     FP8 was asked for where this machine cannot run it
├── PlanError         a selection that matches nothing, or a model that cannot be planned
├── ConversionError   a model that cannot be converted, run or reverted
└── CheckpointError   files that are missing, corrupt, newer than we know, or of another model

A message says what happened with the value, what is allowed, and how to fix it. Faults of our own
are assertions instead, so that nobody catches them as user errors.
"""

__all__ = [
    "CheckpointError",
    "ConversionError",
    "Fp8PatchError",
    "HardwareError",
    "PlanError",
    "RecipeError",
]


class Fp8PatchError(Exception):
    """Base of all errors below; the command line turns it into one line and exit code 1."""


class RecipeError(Fp8PatchError):
    """A recipe, or a field of one, that does not exist or makes no sense."""


class HardwareError(Fp8PatchError):
    """FP8 was asked for where this machine cannot run it."""


class PlanError(Fp8PatchError):
    """A selection that matches nothing, or a model that cannot be planned."""


class ConversionError(Fp8PatchError):
    """A model that cannot be converted, run or reverted."""


class CheckpointError(Fp8PatchError):
    """Files that are missing, corrupt, newer than we know, or of another model."""
