"""Statistics, resizing and the FID network against the programs whose numbers are in print.

Expected values are outputs of torch-fidelity, pytorch-fid, clean-fid, ADM's evaluator, dgm-eval, cmmd-pytorch
and 30-digit arithmetic; every size, seed and option is read from the files.
"""

from __future__ import annotations

import json
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from golden import golden_dir
from safetensors.numpy import load_file
from safetensors.torch import save_file

from visacc.metrics.frechet import frechet, frechet_from_features
from visacc.metrics.inception_score import inception_score, inception_score_adm
from visacc.metrics.mmd import ESTIMATORS, cmmd, kid, mind, mmd2, polynomial_kernel, rbf_kernel
from visacc.metrics.prdc import prdc
from visacc.metrics.resize import RULES
from visacc.metrics.stats import FeatureStats, Gaussian, as_features, merge_all

pytestmark = pytest.mark.golden
GOLDEN = golden_dir("metrics")
CASES = ["well", "n_lt_d", "near_singular", "large_mean", "relu_sparse", "identical", "one_dim"]


@lru_cache
def expected() -> dict[str, Any]:
    return json.loads((GOLDEN / "stats_expected.json").read_text())


@lru_cache
def tensors(name: str) -> dict[str, np.ndarray]:
    return load_file(GOLDEN / f"{name}.safetensors")


@pytest.mark.parametrize("case", CASES)
def test_frechet_equals_30_digit_arithmetic(case: str) -> None:
    want, t = expected()["fid"][case], tensors("fid_features")
    x, y = t[f"{case}.x"], t[f"{case}.y"]
    a, b = FeatureStats.of(x), FeatureStats.of(y)
    from_stats, from_features = frechet(a, b, warn=False), frechet_from_features(x, y)
    from_file = frechet(
        Gaussian(torch.from_numpy(t[f"{case}.mu_x"]), torch.from_numpy(t[f"{case}.sigma_x"])),
        Gaussian(torch.from_numpy(t[f"{case}.mu_y"]), torch.from_numpy(t[f"{case}.sigma_y"])),
        warn=False,
    )
    truth = want["reference_30_digits"]
    if case == "identical":
        assert max(abs(from_stats), abs(from_features), abs(from_file)) < 1e-10
        return
    assert from_features == pytest.approx(truth, rel=1e-10)
    tolerance = {"abs": 2e-6, "rel": 0} if case == "n_lt_d" else {"rel": 1e-9}
    assert from_stats == pytest.approx(truth, **tolerance)
    assert from_file == pytest.approx(truth, **tolerance)


@pytest.mark.parametrize("case", CASES)
def test_frechet_agrees_with_the_libraries(case: str) -> None:
    want, t = expected()["fid"][case], tensors("fid_features")
    value = frechet(FeatureStats.of(t[f"{case}.x"]), FeatureStats.of(t[f"{case}.y"]), warn=False)
    compared = 0
    for library in ("torch_fidelity.float64_stats", "pytorch_fid", "adm_evaluator", "dgm_eval.sqrtm"):
        if want.get(library) is not None:
            assert value == pytest.approx(want[library], rel=1e-6, abs=1e-10), library
            compared += 1
    assert compared >= 1
    # clean-fid and torch-fidelity on float32 features take the mean in float32; equal only when that is
    # harmless
    if case != "large_mean":
        for library in ("clean_fid.float32_mean", "torch_fidelity.float32_features"):
            if want.get(library) is not None:
                assert value == pytest.approx(want[library], rel=1e-6, abs=1e-10), library


def test_parts_merge_to_the_whole() -> None:
    t, parts = tensors("fid_features"), tensors("merge_parts")
    for case, spec in expected()["merge"].items():
        x, cuts = t[f"{case}.x"], spec["boundaries"]
        pieces = [FeatureStats.of(x[i:j]) for i, j in pairwise(cuts)]
        assert [p.n for p in pieces] == spec["counts"]
        for i, piece in enumerate(pieces):
            if f"{case}.part{i}.mean" in parts:
                np.testing.assert_allclose(
                    piece.mean.numpy(), parts[f"{case}.part{i}.mean"], rtol=0, atol=1e-10
                )
                np.testing.assert_allclose(
                    piece.m2.numpy(), parts[f"{case}.part{i}.m2"], rtol=1e-9, atol=1e-9
                )
        whole = merge_all(pieces)
        np.testing.assert_allclose(whole.mean.numpy(), t[f"{case}.mu_x"], rtol=0, atol=1e-10)
        np.testing.assert_allclose(whole.cov.numpy(), t[f"{case}.sigma_x"], rtol=0, atol=1e-11)


def test_kid() -> None:
    t, want = tensors("kid_is_pr_features"), expected()["other"]["kid"]
    x, y = t["kid.x"], t["kid.y"]
    options = {"subsets": want["subsets"], "subset_size": want["subset_size"]}
    rows = np.random.RandomState(2020)
    for i in range(want["subsets"]):  # the draw order itself
        np.testing.assert_array_equal(
            rows.choice(len(x), want["subset_size"], replace=False), t["kid.idx_x"][i]
        )
        np.testing.assert_array_equal(
            rows.choice(len(y), want["subset_size"], replace=False), t["kid.idx_y"][i]
        )
    result = kid(x, y, **options)
    np.testing.assert_allclose(result.per_subset, want["per_subset_float64"], rtol=0, atol=1e-10)
    for key, kernel in (
        ("torch_fidelity.poly.float64_features", polynomial_kernel()),
        ("torch_fidelity.rbf_sigma10", rbf_kernel(10.0)),
        ("torch_fidelity.poly_d2_g0.1_c0.5", polynomial_kernel(2, 0.1, 0.5)),
    ):
        r = kid(torch.from_numpy(x), y, kernel=kernel, **options)
        # the last two were run on float32 features there
        tolerance = 1e-10 if "float64" in key else 1e-6
        assert r.mean == pytest.approx(want[key]["kernel_inception_distance_mean"], abs=tolerance)
        assert r.std == pytest.approx(want[key]["kernel_inception_distance_std"], abs=tolerance)
    n, k = min(len(x), len(y)), polynomial_kernel()
    a, b = as_features(x[:n]), as_features(y[:n])
    for estimator in ESTIMATORS:
        key = next(k for k in want if k.startswith("full_first") and k.endswith(f".{estimator}"))
        assert mmd2(k(a, a), k(b, b), k(a, b), estimator) == pytest.approx(want[key], abs=1e-10)


def test_inception_score() -> None:
    t, want = tensors("kid_is_pr_features"), expected()["other"]["isc"]
    logits = t["isc.logits"]
    np.testing.assert_array_equal(
        np.random.RandomState(2020).permutation(len(logits)), t["isc.perm_seed2020"]
    )
    for key, value in want.items():
        if key.startswith("torch_fidelity."):
            _, splits, shuffle = key.split(".")
            mean, std = inception_score(
                logits, splits=int(splits.removeprefix("splits")), shuffle=shuffle == "shuffleTrue"
            )
            assert mean == pytest.approx(value["inception_score_mean"], abs=1e-10)
            assert std == pytest.approx(value["inception_score_std"], abs=1e-10)
        else:
            size = int(key.rpartition("split_size")[2])
            assert inception_score_adm(logits, split_size=size) == pytest.approx(
                value, abs=1e-5
            )  # float32 there


def test_precision_recall_density_coverage() -> None:
    t, want = tensors("kid_is_pr_features"), expected()["other"]["prc"]
    gen, real = t["prc.generated"], t["prc.real"]
    for key, value in want.items():
        k = int(key.split(".k")[1].split(".")[0])
        result = prdc(gen, real, k=k)
        assert round(result.precision * len(gen)) == round(value["precision"] * len(gen))
        assert round(result.recall * len(real)) == round(value["recall"] * len(real))
        if "f_score" in value:
            assert result.f_score == pytest.approx(value["f_score"], abs=1e-6)
        else:
            assert result.density == pytest.approx(value["density"], abs=1e-12)
            assert result.coverage == pytest.approx(value["coverage"], abs=1e-12)


def test_cmmd_and_mind() -> None:
    t, want = tensors("kid_is_pr_features"), expected()["other"]
    x, y = t["cmmd.x"], t["cmmd.y"]
    assert cmmd(x, y) == pytest.approx(want["cmmd"]["float64"], abs=1e-9)
    key = next(k for k in want["cmmd"] if k.startswith("float64_first"))
    n = int(key.removeprefix("float64_first").split("_")[0])
    assert cmmd(x[:n], y) == pytest.approx(want["cmmd"][key], abs=1e-9)
    for key, value in want["mind"].items():
        m = int(key.removeprefix("projections"))
        assert mind(t["kid.x"], t["kid.y"], projections=m) == pytest.approx(value, rel=1e-6)  # float32 there


RESIZED = {"tf1": "tf1_bilinear", "torch": "torch_bilinear", "clean": "clean_pil_bicubic",
           "pil-bicubic": "pil_bicubic_quantized"}  # fmt: skip


def test_resize_rules() -> None:
    t = tensors("inception_formula")
    cases = sorted({k.split(".")[0] for k in t if k.startswith("resize")})
    assert cases
    for case in cases:
        image = torch.from_numpy(t[case.replace("resize", "inc") + ".image_rgb"]).permute(2, 0, 1)[None]
        for rule, key in RESIZED.items():
            want = t[f"{case}.{key}"].astype(np.float32)
            got = RULES[rule](image, want.shape[1:])[0].numpy()
            atol = {"tf1": 1e-3, "torch": 1e-3, "clean": 1e-2, "pil-bicubic": 0}[rule]
            np.testing.assert_allclose(got, want, rtol=0, atol=atol)


def formula_state(shapes: dict[str, torch.Size], salt: float) -> dict[str, torch.Tensor]:
    """Weights from the closed formula in the golden README (keys sorted, flat index from 1)."""
    state = {}
    for t, key in enumerate(sorted(shapes)):
        shape = shapes[key]
        n = int(np.prod(shape)) if len(shape) else 1
        u = np.sin(np.arange(1, n + 1) * 12.9898 + 78.233 * (t + salt)) * 43758.5453
        v = np.sqrt(3) * (2 * (u - np.floor(u)) - 1)
        if key.endswith("num_batches_tracked"):
            state[key] = torch.tensor(0)
            continue
        if key.endswith("running_var"):
            v = 1 + 0.2 * v
        elif key.endswith("running_mean"):
            v = 0.1 * v
        elif key.endswith("bn.weight"):
            v = 1 + 0.1 * v
        elif key.endswith(("bn.bias", "fc.bias")):
            v = 0.05 * v
        elif key == "fc.weight":
            v = 2 * v / np.sqrt(2048)
        else:
            v = v * np.sqrt(2 / np.prod(shape[1:]))
        state[key] = torch.from_numpy(v.reshape(shape).astype(np.float32))
    return state


def test_fid_inception_forward(tmp_path) -> None:
    module = pytest.importorskip("torch_fidelity.feature_extractor_inceptionv3")
    from visacc.metrics.extractors.inception import FLAVOURS, InceptionFID

    t, meta = tensors("inception_formula"), json.loads((GOLDEN / "inception_formula.json").read_text())
    blank = module.FeatureExtractorInceptionV3.__new__(module.FeatureExtractorInceptionV3)
    original = module.load_state_dict_from_url  # only the module's shapes are wanted: no download
    module.load_state_dict_from_url = lambda *a, **k: (_ for _ in ()).throw(FileNotFoundError)
    try:
        with pytest.raises(FileNotFoundError):
            blank.__init__("x", ["2048"])
    finally:
        module.load_state_dict_from_url = original
    shapes = {k: v.shape for k, v in blank.state_dict().items()}
    assert len(shapes) == meta["num_keys"]
    assert sorted(shapes)[: len(meta["first_keys"])] == meta["first_keys"]
    weights = tmp_path / "formula.safetensors"
    save_file(formula_state(shapes, meta["salt"]), weights)

    heads = ("64", "192", "768", "features", "logits", "spatial")
    golden_key = {"torch-fidelity": "torch_fidelity", "pytorch-fid": "pytorch_fid", "clean-fid": "clean_fid",
                  "torchmetrics": "torchmetrics.antialias_True"}  # fmt: skip
    nets = {f: InceptionFID(weights, f, heads, device="cpu") for f in FLAVOURS}
    assert len({n.id for n in nets.values()}) == len(nets)  # one protocol each
    assert len({n.weights for n in nets.values()}) == 1

    def distance(a: torch.Tensor, b: np.ndarray) -> float:
        return float(np.linalg.norm(a.numpy() - b) / np.linalg.norm(b))

    for case in meta["cases"]:
        key = case["key"]
        image = torch.from_numpy(t[f"{key}.image_rgb"]).permute(2, 0, 1)[None]
        features = {}
        for flavour, net in nets.items():
            out = {h: rows[0] for h, rows in net(image).items()}
            features[flavour] = out["features"]
            assert out["spatial"].shape == (2023,)
            for head, name in (("64", "64"), ("192", "192"), ("768", "768"), ("features", "2048"),
                               ("logits", "logits_unbiased")):  # fmt: skip
                golden = t.get(f"{key}.{golden_key[flavour]}.{name}")
                if golden is not None:
                    assert distance(out[head], golden) < 1e-4, (key, flavour, head)
        # every flavour is closest to its own golden: a mix-up of resize rules cannot pass
        for flavour, row in features.items():
            gaps = {f: distance(row, t[f"{key}.{golden_key[f]}.2048"]) for f in nets}
            assert min(gaps, key=gaps.__getitem__) == flavour
        other = case["relative_distance_to_torch_fidelity"]
        base = t[f"{key}.torch_fidelity.2048"]
        assert distance(features["clean-fid"], base) == pytest.approx(other["clean_fid"], rel=0.02)
        assert distance(features["pytorch-fid"], base) == pytest.approx(other["pytorch_fid"], rel=0.02)
