"""What of a model runs in FP8, and why: `model.plan_model` makes a plan, `types` is what it is.

`walk` finds the candidates, `rules` decide, with what `patterns` choose and `overrides` change;
`values` checks a plan that comes from a file.
"""
