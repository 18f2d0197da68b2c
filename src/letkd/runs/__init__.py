"""Runs on disk: the run folder and its files, checkpoints, evaluation, and results as rows of a table."""
