"""What FP8 does to numbers: `metrics` of a live model; the rest reads files, for `inspect`.

`source` opens what it is given, a `run`'s report or a patched `checkpoint`; `slots` says what its
figures mean, `advice` what to do.
"""
