"""The values of metrics.jsonl by epoch: accuracy, loss terms, learning rate, health of the KD layers."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from letkd.recipes.schema import Recipe
from letkd.report.charts import Chart, Series
from letkd.report.collect import Group
from letkd.runs.grid import Cell, Grid

NOT_TERMS = {"epoch", "lr", "train_top1", "val_top1", "ema_val_top1", "seconds", "loss", "health", "teacher_top1"}

# Labels of the values of `letkd.inspect.health.health`. Shares are shown in per cent.
HEALTH = {
    "used": "templates used",
    "matches": "templates per pixel in p (perplexity)",
    "dead": "dead templates",
    "discarded": "pixels that discard all, %",
    "added": "α‖x'‖ / ‖x‖",
    "agreement": "p_S agrees with p_T, %",
    "entropy_S": "entropy of p_S, nats",
    "entropy_T": "entropy of p_T, nats",
    "perplexity_T": "labels per pixel in p_T (perplexity)",
    "scale_omega": "scale of ω",
    "scale_nu": "scale of ν",
}
SHARES = {"discarded", "agreement"}
DIGITS = {"used": 1, "matches": 1, "dead": 1}

LARGEST = 1e30
Value = Callable[[dict[str, Any]], float | None]


def by_epoch(group: Group, value: Value, name: str, colour: int) -> Series:
    """Mean over seeds of a value by epoch, with its minimum and maximum."""
    columns: dict[int, list[float]] = {}
    for run in group.runs:
        for row in run.rows:
            found = value(row)
            if found is not None and abs(found) < LARGEST:  # skips NaN, infinity and values too large for an axis
                columns.setdefault(int(row["epoch"]), []).append(float(found))
    epochs = range(1, last_epoch(group) + 1)
    by_seed = [columns.get(epoch) for epoch in epochs]
    has_band = any(values and len(values) > 1 for values in by_seed)
    low = [min(values) if values else None for values in by_seed]
    high = [max(values) if values else None for values in by_seed]
    mean = [statistics.mean(values) if values else None for values in by_seed]
    return Series(name, mean, colour, low if has_band else None, high if has_band else None)


def last_epoch(group: Group) -> int:
    return max((int(row["epoch"]) for run in group.runs for row in run.rows), default=0)


def _chart(key: str, title: str, y_label: str, groups: Sequence[Group], value: Value, pair: str, **more: Any) -> list[Chart]:
    """A chart with one line per group; no chart if no group has the value."""
    series = [by_epoch(group, value, group.title, k) for k, group in enumerate(groups)]
    series = [one for one in series if any(y is not None for y in one.y)]
    if not series:
        return []
    x = sorted({epoch for one in series for epoch, y in enumerate(one.y, start=1) if y is not None})
    chosen = [replace(one, y=_at(x, one.y), low=_at(x, one.low), high=_at(x, one.high)) for one in series]
    return [Chart(key, title, "epoch", y_label, x, chosen, group=pair, **more)]


def _at(x: list[int], values: Any) -> Any:
    """The values of these epochs; None after the last one."""
    return None if values is None else [values[epoch - 1] if epoch <= len(values) else None for epoch in x]


def curves(pair: str, groups: Sequence[Group]) -> list[Chart]:
    """Validation and training accuracy and learning rate, one line per method; then the losses of each method."""
    charts = _chart("val", "Validation accuracy", "top-1, %", groups, lambda row: row.get("val_top1"), pair)
    charts += _chart(
        "ema",
        "Validation accuracy, average of the weights (EMA)",
        "top-1, %",
        groups,
        lambda row: row.get("ema_val_top1"),
        pair,
    )
    charts += _chart(
        "train", "Training accuracy (augmented images)", "top-1, %", groups, lambda row: row.get("train_top1"), pair
    )
    for chart in _chart("lr", "Learning rate", "rate", groups, lambda row: row.get("lr"), pair, log_y=True, digits=5):
        first = chart.series[0]
        alike = len(chart.series) > 1 and all(one.y == first.y for one in chart.series)
        charts.append(replace(chart, series=[replace(first, name="all", low=None, high=None)] if alike else chart.series))
    for group in groups:
        charts += _losses(pair, group)
    return charts


def _losses(pair: str, group: Group) -> list[Chart]:
    names = {
        name
        for run in group.runs
        for row in run.rows
        for name in row
        if name not in NOT_TERMS and not name.startswith(("weight/", "val/"))
    }
    order = ["loss", *sorted(names, key=lambda name: (name != "ce", name))] if len(names) > 1 else sorted(names)
    series = [by_epoch(group, lambda row, name=name: row.get(name), name, k) for k, name in enumerate(order)]
    if not series or not last_epoch(group):
        return []
    weights = group.runs[0].recipe.weights
    measured = next((run.rows[-1] for run in group.runs if run.rows), {})
    terms = ", ".join(
        f"{name} × {_weight(weights.get(name, 1.0), measured.get(f'weight/{name}'))}" for name in order if name != "loss"
    )
    note = f"Terms without their weights; loss = the sum of {terms}." if len(order) > 1 else ""
    title = f"Loss: {group.title}"
    return [
        Chart(f"loss-{group.key}", title, "epoch", "loss", list(range(1, last_epoch(group) + 1)), series, note=note, group=pair)
    ]


def _weight(weight: float | str, measured: float | None) -> str:
    """A weight as text; of an automatic one also its last value."""
    if not isinstance(weight, str):
        return f"{weight:g}"
    return weight if measured is None else f"{measured:.4g} ({weight})"


def training(groups: Sequence[Group]) -> Grid | None:
    """How the methods were trained, one row per set of settings; None if there are no runs."""
    by_settings: dict[tuple[str, ...], list[str]] = {}
    for group in groups:
        if group.runs:
            by_settings.setdefault(_settings(group.runs[0].recipe), []).append(group.title)
    names = ["methods", "optimiser", "schedule", "epochs", "batch", "augmentation", "mix", "EMA"]
    rows = [
        [Cell("all" if len(by_settings) == 1 else ", ".join(titles)), *map(Cell, settings)]
        for settings, titles in by_settings.items()
    ]
    return Grid("Training", names, rows, []) if rows else None


def _settings(recipe: Recipe) -> tuple[str, ...]:
    data, optim, train = recipe.data, recipe.optim, recipe.train
    schedule = optim.schedule + (f" {optim.milestones}" if optim.schedule == "milestones" else "")
    return (
        f"{optim.name}, lr {optim.lr:g}",
        schedule + (f", warm-up {optim.warmup:g}" if optim.warmup else ""),
        str(train.epochs),
        str(data.batch_size) + (f" × {train.accumulate}" if train.accumulate else ""),
        data.augment + (f", erase {data.erase:g}" if data.erase else ""),
        data.mix + ("" if data.mix == "none" else f", α {data.mix_alpha:g}"),
        "–" if train.ema is None else f"{train.ema:g}",
    )


def health_charts(pair: str, groups: Sequence[Group]) -> list[Chart]:
    """All health values of all sites by epoch, one line per method that has the site."""
    rows = [row for group in groups for run in group.runs for row in run.rows]
    sites = sorted({site for row in rows for site in _health(row)}, key=lambda site: (site != "penultimate", site))
    charts = []
    for site in sites:
        for name, words in HEALTH.items():
            factor = 100.0 if name in SHARES else 1.0

            def value(row: dict[str, Any], site: str = site, name: str = name, factor: float = factor) -> float | None:
                found = _health(row).get(site, {}).get(name)
                return None if found is None else factor * found

            charts += _chart(f"health-{site}-{name}", words, words, groups, value, pair, digits=DIGITS.get(name, 2))
    return charts


def _health(row: dict[str, Any]) -> dict[str, dict[str, float]]:
    health = row.get("health")
    return health if isinstance(health, dict) else {}
