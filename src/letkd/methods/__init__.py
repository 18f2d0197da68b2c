"""The methods: one file each, named as in the paper's tables."""

from letkd.methods.ab import AB
from letkd.methods.at import AT
from letkd.methods.base import Method
from letkd.methods.crd import CRD
from letkd.methods.dist import DIST
from letkd.methods.dkd import DKD
from letkd.methods.fitnet import FitNet
from letkd.methods.fsp import FSP
from letkd.methods.kd import KD
from letkd.methods.letkd import LetKD, letkd1, letkd2
from letkd.methods.mlkd import MLKD
from letkd.methods.quest_kd import QUEST, quest
from letkd.methods.registry import METHODS, register_method
from letkd.methods.reviewkd import ReviewKD
from letkd.methods.simkd import SimKD
from letkd.methods.site import Site
from letkd.methods.sp import SP
from letkd.methods.srd import SRD
from letkd.methods.tdd import TDD
from letkd.methods.vid import VID

_OURS = (KD, FitNet, AT, AB, FSP, SP, VID, CRD, DKD, SimKD, TDD, QUEST, LetKD, DIST, ReviewKD, SRD, MLKD)
for _method in _OURS:
    register_method(_method)

__all__ = ["METHODS", "Method", "Site", "letkd1", "letkd2", "quest", "register_method", *(cls.__name__ for cls in _OURS)]  # pyright: ignore
