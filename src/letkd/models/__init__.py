"""The zoo: importing it registers every family."""

from letkd.models import resnet as resnet
from letkd.models.base import create_model, list_models
from letkd.models.weights import load_weights, save_weights

__all__ = ["create_model", "list_models", "load_weights", "save_weights"]
