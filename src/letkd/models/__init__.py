"""The zoo: importing it registers every family."""

from letkd.models import mobilenetv1 as mobilenetv1
from letkd.models import mobilenetv2 as mobilenetv2
from letkd.models import resnet as resnet
from letkd.models import resnet50_cifar as resnet50_cifar
from letkd.models import resnet_a as resnet_a
from letkd.models import resnet_bottleneck as resnet_bottleneck
from letkd.models import resnet_imagenet as resnet_imagenet
from letkd.models import shufflenet as shufflenet
from letkd.models import vgg as vgg
from letkd.models import wrn as wrn
from letkd.models.base import create_model, list_models, register_model
from letkd.models.weights import load_weights, save_weights

__all__ = ["create_model", "list_models", "load_weights", "register_model", "save_weights"]
