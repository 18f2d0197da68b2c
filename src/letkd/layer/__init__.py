"""The KD layer: its definition, the form for training that needs less memory, the form for inference."""

from letkd.layer.kd_layer import CosineConv1x1, KDLayer, soft_match

__all__ = ["CosineConv1x1", "KDLayer", "soft_match"]
