"""From a trained student to what ships: folded, pruned, exported, quantised, and used without its training."""
