"""Every method and every supervision, as small as they come: the contract tests run over these two tables."""

from collections.abc import Callable

from letkd.methods import (
    AB,
    AT,
    CRD,
    DIST,
    DKD,
    FSP,
    KD,
    MLKD,
    QUEST,
    SP,
    SRD,
    TDD,
    VID,
    FitNet,
    LetKD,
    Method,
    ReviewKD,
    SimKD,
    Site,
    letkd1,
    letkd2,
    quest,
)
from letkd.supervision import ConvSupervision, KMeansSupervision, SubclassSupervision, Supervision
from tests.support.pair import C

METHODS: dict[str, Callable[[], Method]] = {
    "kd": KD,
    "fitnet": FitNet,
    "at": AT,
    "ab": AB,
    "fsp": FSP,
    "sp": SP,
    "vid": VID,
    "crd": lambda: CRD(K=8, feat_dim=6),
    "dkd": lambda: DKD(warmup=1),
    "kd-ls": lambda: KD(2, standardise=True),
    "dkd-ls": lambda: DKD(T=2, warmup=1, standardise=True),
    "dist": DIST,
    "reviewkd": lambda: ReviewKD(warmup=0),
    "srd": SRD,
    "mlkd": MLKD,
    "simkd": SimKD,
    "tdd": TDD,
    "quest": lambda: quest(6),
    "quest(2)": lambda: QUEST(
        [Site("intermediate", KMeansSupervision(5, 0.1)), Site("penultimate", KMeansSupervision(6))],
    ),
    "letkd-1": lambda: letkd1(6),
    "letkd-1, sharp": lambda: letkd1(6, sharp=True),
    "letkd-1(2)": lambda: LetKD(
        [Site("intermediate", KMeansSupervision(5, 0.1)), Site("penultimate", KMeansSupervision(6))],
    ),
    "letkd-2": lambda: letkd2(6, 2),
    "letkd-1 without K-means": lambda: LetKD([Site("penultimate", ConvSupervision())]),
    "sub-classes at penultimate": lambda: LetKD(
        [Site("penultimate", SubclassSupervision(2), normalize_value_input=False)],
    ),
}

SUPERVISIONS: dict[str, Callable[[], Supervision]] = {
    "kmeans": lambda: KMeansSupervision(6, 0.5),
    "conv3x3": ConvSupervision,
    "subclass": lambda: SubclassSupervision(3, C=C),
}
