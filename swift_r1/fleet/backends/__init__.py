"""The backends of a launch: the name after `--on`, and the module of each, which is imported when it is asked for.

A module has `open_backend(run: RunFile, silence_s: float) -> ClusterBackend`, which raises UsageError for options that
cannot be (`run_file.read_options`); its agents end themselves when they have heard nothing for `silence_s` seconds. One
that does not drive the launch from here (a job that is submitted, a manifest that is only printed) also has
`hand_over(run: RunFile, words: Sequence[str], dry_run: bool) -> int | None`: the exit code, or None to go on here.
`words` are those after `swift launch`. One that has to ask for nodes before it can name them also has
`planned(run: RunFile, silence_s: float) -> ClusterBackend`, with names that stand for theirs in a dry run.
"""

from __future__ import annotations

BACKENDS = {
    "local": "swift_r1.fleet.backends.local",
    "ssh": "swift_r1.fleet.backends.ssh",
    "slurm": "swift_r1.fleet.backends.slurm",
    "ray": "swift_r1.fleet.backends.ray",
    "kubernetes": "swift_r1.fleet.backends.kubernetes",
}
