"""What counts as a step: when the scales of a bank may move.

An optimizer that owns one of the model's parameters has stepped. Where none ever did (a loop over
`p.data`, written by hand), any finished backward counts.
"""

from dataclasses import dataclass


@dataclass(slots=True)
class StepClock:
    """Attributes:
    stepped: An optimizer of ours has stepped since the last update.
    backward_finished: A backward has.
    optimizer_seen: One has stepped at some time, so backward passes alone mean nothing.
    backwards, backwards_a_step: Backward passes since the last step, and in the step before it.
    copied: These are a copy's: whatever optimizer the original has, it is none of ours.
    orphaned: The optimizers that stepped are gone.
    """

    stepped: bool = False
    backward_finished: bool = False
    optimizer_seen: bool = False
    backwards: int = 0
    backwards_a_step: int = 1
    copied: bool = False
    orphaned: bool = False

    def saw_step(self) -> None:
        """Our optimizer has stepped."""
        self.stepped = self.optimizer_seen = True
        self.backwards_a_step, self.backwards, self.copied = max(self.backwards, 1), 0, False

    def saw_backward(self) -> None:
        """A backward has finished."""
        self.backward_finished = True
        self.backwards += 1

    @property
    def due(self) -> bool:
        """Has a step passed since the last update?"""
        # Until a copy meets its optimizer (or a model its next one), a step is as many backward
        # passes as it was before: it may be trained without any, and the scales must not stand
        # still for that.
        alone = self.copied or self.orphaned
        unseen = not self.optimizer_seen or (alone and self.backwards >= self.backwards_a_step)
        return self.stepped or (self.backward_finished and unseen)

    def updated(self) -> None:
        """The scales have moved."""
        self.stepped = self.backward_finished = False
        self.backwards = 0
