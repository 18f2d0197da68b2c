"""The methods: one file each, named as in the paper's tables."""

from letkd.methods.base import Method
from letkd.methods.kd import KD
from letkd.methods.letkd import LetKD, letkd1, letkd2
from letkd.methods.quest import QUEST, Site, quest

METHODS: dict[str, type[Method]] = {cls.name: cls for cls in (KD, QUEST, LetKD)}

__all__ = ["KD", "METHODS", "QUEST", "LetKD", "Method", "Site", "letkd1", "letkd2", "quest"]
