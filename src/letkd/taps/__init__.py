"""Taps: read features inside a network, insert layers, and find suitable modules."""

from letkd.taps.find import find_taps
from letkd.taps.grafts import Graft, Replacement, check_model, find_module, graft, layout_of_graft, replace_module
from letkd.taps.tap import Tap, Taps, as_logits, as_taps, probe, run_once
from letkd.taps.tracing import ModuleRun, trace

__all__ = [
    "Graft",
    "ModuleRun",
    "Replacement",
    "Tap",
    "Taps",
    "as_logits",
    "as_taps",
    "check_model",
    "find_module",
    "find_taps",
    "graft",
    "layout_of_graft",
    "probe",
    "replace_module",
    "run_once",
    "trace",
]
