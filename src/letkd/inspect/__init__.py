"""What a trained layer does: its health and its sites, for training and for reports."""
