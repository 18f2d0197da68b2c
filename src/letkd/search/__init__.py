"""Search: which values of a recipe are best on the validation split, by Optuna (`pip install letkd[search]`)."""
