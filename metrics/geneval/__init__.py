"""GenEval (arXiv 2310.11513): prompts, image layout, detectors, decision logic, results.

judge = Judge(create_detector("mask2former", weights="mask2former_swin-s...pth"),
ColourClassifier(OpenClipEncoder())) records = list(score_files(judge, pairs(scan(root)), root=root))
print(summarise(records).text())
"""

from visacc.metrics.geneval.colours import ColourClassifier, OpenClipEncoder, cut_out
from visacc.metrics.geneval.detectors import Detections, Detector
from visacc.metrics.geneval.detectors import create as create_detector
from visacc.metrics.geneval.detectors import names as detector_names
from visacc.metrics.geneval.detectors import register as register_detector
from visacc.metrics.geneval.layout import PromptImages, read_prompts, sample_path, scan
from visacc.metrics.geneval.logic import CLASSES, COLORS, TAGS, Options, official_prompts
from visacc.metrics.geneval.run import Judge, pairs, score_files, to_scores
from visacc.metrics.geneval.summary import compare, read_results, summarise, to_line

__all__ = [
    "CLASSES",
    "COLORS",
    "TAGS",
    "ColourClassifier",
    "Detections",
    "Detector",
    "Judge",
    "OpenClipEncoder",
    "Options",
    "PromptImages",
    "compare",
    "create_detector",
    "cut_out",
    "detector_names",
    "official_prompts",
    "pairs",
    "read_prompts",
    "read_results",
    "register_detector",
    "sample_path",
    "scan",
    "score_files",
    "summarise",
    "to_line",
    "to_scores",
]
