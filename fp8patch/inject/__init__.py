"""Inside a script's process under `fp8patch train`: `patch.arm` and `fp8patch.enable` begin it.

`run` is one such process. It finds the models (`models`, `training`), plans and compiles them
(`plan`, `compile`, `conflicts`), follows their steps (`record`, `outputs`, `coverage`, `history`,
`series`), and tells of them (`progress`, `report`, `track`, `trackers`). `compat`, `pickling` and
`sidecar` are what the script's libraries need.
"""
