"""The KD layer: its definition, the fused form for training, which needs less memory, and the folded form for inference."""

from letkd.layer.kd_layer import CosineConv1x1, KDLayer, soft_match

__all__ = ["CosineConv1x1", "KDLayer", "soft_match"]
