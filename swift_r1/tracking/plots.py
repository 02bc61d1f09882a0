"""A run's curves as PNG files, drawn from its `logging.jsonl`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_FILES: Mapping[str, tuple[str, ...]] = {
    "reward": ("reward", "reward_std", "frac_reward_zero_std"),
    "length": ("completions/mean_length", "completions/max_length", "completions/clipped_ratio"),
    "loss": ("loss", "grad_norm", "learning_rate"),
    "policy": ("kl", "entropy", "clip_ratio/low", "clip_ratio/high", "rollout/logp_diff"),
    "critic": (
        "value_loss",
        "explained_variance",
        "returns/mean",
        "values/mean",
        "critic/grad_norm",
        "clip_ratio/value",
    ),
    "time": ("time/generate", "time/reward", "time/train", "time/sync", "time/step"),
}


def draw_curves(rows: Sequence[Mapping[str, Any]], folder: Path) -> list[Path]:
    """One PNG a family of metrics, a panel a metric that the rows hold; returns the files."""
    import matplotlib

    matplotlib.use("Agg")
    folder.mkdir(parents=True, exist_ok=True)
    names = sorted({name for row in rows for name in row})
    families = dict(_FILES)
    families["rewards"] = tuple(name for name in names if name.startswith("rewards/") and name.endswith("/mean"))
    families["eval"] = tuple(
        name for name in names if name.startswith("eval/") and name.endswith(("/accuracy", "/reward"))
    )
    files = []
    for family, wanted in families.items():
        present = [name for name in wanted if name in names]
        if present:
            files.append(_draw(rows, present, folder / f"{family}.png"))
    return files


def _draw(rows: Sequence[Mapping[str, Any]], names: Sequence[str], path: Path) -> Path:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 2.4 * len(names)), layout="constrained")
    panels = figure.subplots(len(names), 1, squeeze=False)[:, 0]
    for panel, name in zip(panels, names, strict=True):
        points = [(row["step"], row[name]) for row in rows if row.get(name) is not None]
        panel.plot(*zip(*points, strict=True) if points else ((), ()), marker="." if len(points) < 60 else "")
        panel.set_title(name, fontsize=9, loc="left")
        panel.grid(alpha=0.3)
    panels[-1].set_xlabel("step")
    figure.savefig(path, dpi=110)
    return path
