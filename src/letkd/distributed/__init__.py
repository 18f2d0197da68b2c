"""Training in several processes: ranks, communication, and batch normalisation over all of them."""
