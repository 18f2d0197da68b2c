"""Deployment of a trained student: fold, prune, export, quantise, predict."""
