"""Runs on disk: the run folder with every file in it, checkpoints, evaluation, and results as rows of a table."""
