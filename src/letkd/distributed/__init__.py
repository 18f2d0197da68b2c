"""Several processes: who they are, what they tell each other, and batch normalisation over all of them."""
