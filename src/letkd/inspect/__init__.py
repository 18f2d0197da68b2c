"""Inspection of KD layers: their health and the maps at their sites, for training and reports."""
