"""The trackers that a script has started itself: an Accelerator's, and a Trainer's callbacks.

The first are known from `init_trackers` to `end_training`, the others while their Trainer trains.
Both are found by hooks in their classes, set when the script imports them; no object of the
script's is touched.
"""

import copy
import sys
import weakref
from collections.abc import Callable
from typing import Any

__all__ = ["Log", "active", "before_end", "listen", "stepped"]

# (values, step)
Log = Callable[[dict[str, float], int], None]

# They show a run in a terminal or a notebook, where a log of many figures would be in the way.
_SHOWN = ("PrinterCallback", "ProgressCallback", "NotebookProgressCallback")
_GIVEN = ("args", "state", "control")

_listening = False
_accelerators: list["weakref.ref[Any]"] = []
_trainers: list["_Trainer"] = []
_before_end: "weakref.WeakMethod[Callable[[], None]] | None" = None


def active() -> list[tuple[str, Log]]:
    """(name, what logs to it) of each tracker that takes figures now."""
    found: list[tuple[str, Log]] = []
    for reference in _accelerators:
        accelerator = reference()
        for tracker in () if accelerator is None else accelerator.trackers:
            found.append((str(tracker.name), _log_of(tracker)))
    for trainer in _trainers:
        for callback in trainer.callbacks():
            found.append((type(callback).__name__, trainer.log_of(callback)))
    return found


def stepped(steps: int) -> None:
    """The run's optimizer step `steps` is over, and no Trainer has counted it yet."""
    for trainer in _trainers:
        # It counts on from where it was resumed.
        trainer.ahead = trainer.state.global_step + 1 - steps


def before_end(method: Callable[[], None]) -> None:
    """Call this bound method, held weakly, before trackers are closed; one for the process."""
    global _before_end
    _before_end = weakref.WeakMethod(method)


def _log_of(tracker: Any) -> Log:
    def log(values: dict[str, float], step: int) -> None:
        if tracker.name == "wandb":
            # It drops what is of a step before its own: the line that it is at takes this along.
            tracker.log({**values, "fp8/step": step}, step=None, commit=False)
        else:
            tracker.log(values, step=step)

    return log


class _Trainer:
    """A Trainer at work, by what it calls its callbacks with."""

    def __init__(self, handler: Any, args: Any, state: Any, control: Any) -> None:
        self.handler = weakref.ref(handler)
        self.args, self.state, self.control = args, state, control
        self.ahead = 0

    def callbacks(self) -> list[Any]:
        """Those that take a log."""
        handler = self.handler()
        stock = sys.modules["transformers.trainer_callback"].TrainerCallback.on_log
        return [
            callback
            for callback in ([] if handler is None else handler.callbacks)
            if type(callback).on_log is not stock and type(callback).__name__ not in _SHOWN
        ]

    def log_of(self, callback: Any) -> Log:
        """Not `Trainer.log`: it also keeps what it logs, and those of TRL add to it the figures
        that they have gathered for the script's own next line.
        """

        def log(values: dict[str, float], step: int) -> None:
            handler: Any = copy.copy(self.handler())
            handler.callbacks = [callback]
            state = copy.copy(self.state)
            state.global_step = step + self.ahead
            # Once a handler has logged it takes back "log after this step"; the script's is due.
            handler.on_log(self.args, state, copy.copy(self.control), values)

        return log


# -- finding them ---------------------------------------------------------------------------------


def listen() -> None:
    """Hook the classes when their modules are imported. Imports nothing of them itself."""
    global _listening
    if _listening:
        return
    _listening = True
    import wrapt

    wrapt.register_post_import_hook(_hook_accelerator, "accelerate.accelerator")
    wrapt.register_post_import_hook(_hook_handler, "transformers.trainer_callback")


def _ending() -> None:
    method = None if _before_end is None else _before_end()
    if method is not None:
        method()


def _forget(owner: Any) -> None:
    """This one, and all that are gone."""
    _accelerators[:] = [r for r in _accelerators if r() is not None and r() is not owner]
    _trainers[:] = [t for t in _trainers if t.handler() is not None and t.handler() is not owner]


def _hook_accelerator(module: Any) -> None:
    import wrapt

    def init_trackers(wrapped: Callable[..., Any], owner: Any, args: Any, kwargs: Any) -> Any:
        result = wrapped(*args, **kwargs)
        _forget(owner)
        _accelerators.append(weakref.ref(owner))
        return result

    wrapt.wrap_function_wrapper(module.Accelerator, "init_trackers", init_trackers)
    wrapt.wrap_function_wrapper(module.Accelerator, "end_training", _around_end)


def _hook_handler(module: Any) -> None:
    import wrapt

    def on_train_begin(wrapped: Callable[..., Any], owner: Any, args: Any, kwargs: Any) -> Any:
        result = wrapped(*args, **kwargs)
        given = dict(zip(_GIVEN, args, strict=False)) | kwargs
        _forget(owner)
        _trainers.append(_Trainer(owner, *(given[name] for name in _GIVEN)))
        return result

    wrapt.wrap_function_wrapper(module.CallbackHandler, "on_train_begin", on_train_begin)
    wrapt.wrap_function_wrapper(module.CallbackHandler, "on_train_end", _around_end)


def _around_end(wrapped: Callable[..., Any], owner: Any, args: Any, kwargs: Any) -> Any:
    _ending()
    _forget(owner)
    return wrapped(*args, **kwargs)
