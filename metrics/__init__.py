"""Quality and equality measures: Fréchet family, GenEval, CLIP scores, captions.

Statistics and decision logic need only numpy and torch; networks come from libraries and are imported when a
feature extractor or detector is created (extra `eval`).
"""

from visacc.metrics.extractors import Extractor
from visacc.metrics.extractors import create as create_extractor
from visacc.metrics.extractors import names as extractor_names
from visacc.metrics.extractors import register as register_extractor
from visacc.metrics.frechet import fd_infinity, frechet, frechet_from_features
from visacc.metrics.inception_score import inception_score, inception_score_adm
from visacc.metrics.metric import CMMD, FID, MIND, SFID, InceptionScore, KernelDistance, Manifold, Metric
from visacc.metrics.mmd import cmmd, kid, mind
from visacc.metrics.npz import load_stats, save_stats
from visacc.metrics.prdc import prdc
from visacc.metrics.protocol import PAPERS, Protocol, Score
from visacc.metrics.stats import FeatureStats, Gaussian, merge_all

__all__ = [
    "CMMD",
    "FID",
    "MIND",
    "PAPERS",
    "SFID",
    "Extractor",
    "FeatureStats",
    "Gaussian",
    "InceptionScore",
    "KernelDistance",
    "Manifold",
    "Metric",
    "Protocol",
    "Score",
    "cmmd",
    "create_extractor",
    "extractor_names",
    "fd_infinity",
    "frechet",
    "frechet_from_features",
    "inception_score",
    "inception_score_adm",
    "kid",
    "load_stats",
    "merge_all",
    "mind",
    "prdc",
    "register_extractor",
    "save_stats",
]
