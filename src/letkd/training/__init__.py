"""Training: the loop, the optimiser, checkpoints, evaluation and run folders."""
