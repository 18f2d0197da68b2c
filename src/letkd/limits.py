"""Bounds of values that recipes and files share."""

LARGEST_SIDE = 16_384  # pixels
STEEPEST = 1e6  # of rates, weights, means: beyond it float32 overflows within a few steps
