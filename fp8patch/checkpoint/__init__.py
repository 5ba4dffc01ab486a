"""Checkpoints with FP8 state: `save_load` is `fp8patch.save` and `fp8patch.load`.

The sidecar is in `sidecar` (its files), `checks` (what they may hold), `state` (from and to a live
model), `ranks` (of distributed runs) and `hooks` (other libraries' savers). Directories on disk are
in `stream`, which converts and reverts them, with `skeleton`, `tensors`, `weights` and `calibrate`;
`files` and `workspace` write what appears whole or not at all.
"""
