"""Statistics, protocols, files and metric classes: properties, bad input, agreement of the routes to one
number.
"""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from metric_cases import Patches, pictures

import visacc.metrics as vm
from visacc.metrics.equality import mmd_permutation_test, token_test
from visacc.metrics.frechet import expected_bias
from visacc.metrics.protocol import PAPERS, Protocol, Score, columns, difference, recipe
from visacc.metrics.scores import FeatureSet, compute
from visacc.metrics.stats import FeatureStats, Gaussian, merge_all

# ---------------------------------------------------------------- statistics


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=8), st.integers(1, 6), st.floats(-1e5, 1e5))
def test_any_split_gives_the_same_statistics(sizes: list[int], d: int, offset: float) -> None:
    n = sum(sizes)
    x = np.random.default_rng(n + d).normal(size=(n + 2, d)) + offset
    cuts = np.cumsum([0, *sizes, 2])
    whole = FeatureStats.of(x)
    parts = [FeatureStats(d).update(x[i:j]) for i, j in pairwise(cuts)]
    merged = merge_all(parts)
    batches = FeatureStats(d)
    for i, j in pairwise(cuts):
        batches.update(x[i:j])
    for got in (merged, batches):
        assert got.n == n + 2
        scale = 1 + abs(offset)
        np.testing.assert_allclose(got.mean.numpy(), x.mean(0), rtol=0, atol=1e-12 * scale)
        np.testing.assert_allclose(got.cov.numpy(), np.cov(x.T).reshape(d, d), rtol=0, atol=1e-12 * scale)
    again = FeatureStats.from_flat(whole.flat())
    assert again.n == whole.n
    assert torch.equal(again.m2, whole.m2)


def test_rank_order_decides_the_bits_not_the_rank_count() -> None:
    x = torch.randn(64, 5, generator=torch.Generator().manual_seed(0))
    one = merge_all(FeatureStats.of(x[i : i + 8]) for i in range(0, 64, 8))
    states = [FeatureStats.of(x[i : i + 8]).flat() for i in range(0, 64, 8)]
    other = merge_all(FeatureStats.from_flat(s) for s in states)
    assert torch.equal(one.m2, other.m2)


def test_refused_statistics() -> None:
    with pytest.raises(ValueError, match="at least 2 images, got 1"):
        _ = FeatureStats.of(np.ones((1, 3))).cov
    with pytest.raises(ValueError, match=r"NaN or infinite values in 1 of 4 rows \(first row 2\)"):
        FeatureStats.of(np.array([[1.0], [2.0], [np.nan], [3.0]]))
    with pytest.raises(ValueError, match=r"must be \[n, d\]"):
        FeatureStats.of(np.ones(3))
    with pytest.raises(ValueError, match="hold 3-d features, got 4-d"):
        FeatureStats(3).update(np.ones((2, 4)))
    a, b = FeatureStats(2, extractor="a"), FeatureStats(2, extractor="b").update(np.ones((1, 2)))
    with pytest.raises(ValueError, match="cannot merge features of 'b'"):
        a.merge(b)
    rows = np.random.default_rng(0).normal(size=(5, 2))
    with pytest.raises(ValueError, match="different feature extractors"):
        vm.frechet(FeatureStats.of(rows, "a"), FeatureStats.of(rows, "b"))
    with pytest.raises(ValueError, match="2 and 3 feature dimensions"):
        vm.frechet(FeatureStats.of(rows), FeatureStats.of(np.random.default_rng(0).normal(size=(5, 3))))
    with pytest.raises(ValueError, match="covariance must be"):
        Gaussian(torch.zeros(3), torch.zeros(2, 2))
    with pytest.raises(ValueError, match="NaN"):
        Gaussian(torch.zeros(1), torch.full((1, 1), torch.nan))


def test_frechet_of_known_gaussians() -> None:
    """Diagonal covariances have a closed form; a rotation changes nothing."""
    rng = np.random.default_rng(1)
    s1, s2, mu = rng.uniform(0.1, 4, 9), rng.uniform(0.1, 4, 9), rng.normal(size=9)
    q = torch.linalg.qr(torch.from_numpy(rng.normal(size=(9, 9))))[0]
    want = float((mu**2).sum() + ((np.sqrt(s1) - np.sqrt(s2)) ** 2).sum())
    a = Gaussian(torch.zeros(9), q @ torch.diag(torch.from_numpy(s1)) @ q.T)
    b = Gaussian(q @ torch.from_numpy(mu), q @ torch.diag(torch.from_numpy(s2)) @ q.T)
    assert vm.frechet(a, b) == pytest.approx(want, rel=1e-12)
    assert vm.frechet(a, b) == pytest.approx(vm.frechet(b, a), rel=1e-12)
    singular = Gaussian(torch.zeros(9), torch.zeros(9, 9))
    assert vm.frechet(singular, a) == pytest.approx(float(s1.sum()), rel=1e-12)


def test_expected_bias_is_the_mean_distance_of_equal_sets() -> None:
    """60 repetitions, |mean - formula| < 5 standard errors: a correct formula fails with probability
    below 1e-6 (plus its own higher-order error, under 2 % here).
    """
    g = torch.Generator().manual_seed(3)
    scale = torch.logspace(0, -0.5, 10, dtype=torch.float64)
    draw = lambda n: torch.randn(n, 10, generator=g, dtype=torch.float64) * scale  # noqa: E731
    values = np.array([vm.frechet(FeatureStats.of(draw(300)), FeatureStats.of(draw(400))) for _ in range(60)])
    want = expected_bias(torch.diag(scale**2), 300, 400)
    assert abs(values.mean() - want) < 5 * values.std() / 60**0.5 + 0.02 * want


def test_small_sets_warn_with_the_bias() -> None:
    x = np.random.default_rng(0).normal(size=(20, 40))
    with pytest.warns(UserWarning, match=r"20 images for 40-d features.*expected from sample size"):
        vm.frechet(FeatureStats.of(x), FeatureStats.of(x))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        vm.frechet(FeatureStats.of(x[:, :5]), FeatureStats.of(x[:, :5]))


def test_fd_infinity_removes_the_bias() -> None:
    """Equal distributions: the extrapolation is nearer to zero than the value itself (fixed seed,
    deterministic).
    """
    g = torch.Generator().manual_seed(0)
    x, y = torch.randn(600, 20, generator=g), torch.randn(20000, 20, generator=g)
    ref = FeatureStats.of(y)
    value, (intercept, slope) = vm.frechet(FeatureStats.of(x), ref), vm.fd_infinity(x, ref)
    assert abs(intercept) < 0.4 * value
    assert slope > 0
    with pytest.raises(ValueError, match="at least 20"):
        vm.fd_infinity(x[:5], ref)


def test_kernel_and_manifold_refusals() -> None:
    x = np.random.default_rng(0).normal(size=(30, 4))
    with pytest.raises(ValueError, match="generated set has 30 images, fewer than subset_size=1000"):
        vm.kid(x, x)
    with pytest.raises(ValueError, match="at least 2"):
        vm.kid(x, x, subset_size=1)
    with pytest.raises(ValueError, match="L2-normalised"):
        vm.cmmd(x, x)
    with pytest.raises(ValueError, match="k must be at least 1"):
        vm.prdc(x[:3], x, k=3)
    with pytest.raises(ValueError, match="needs at least 80 images, got 30"):
        vm.inception_score(x, splits=40)
    with pytest.raises(ValueError, match="feature dimensions differ"):
        vm.prdc(x, x[:, :2])


def test_kid_of_a_memory_map_equals_kid_of_an_array(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x, y = (rng.normal(size=(70, 6)).astype(np.float32) for _ in range(2))
    np.save(tmp_path / "x.npy", x)
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    options: dict[str, Any] = {"subsets": 4, "subset_size": 20}
    assert (
        vm.kid(mapped, y, **options) == vm.kid(x, y, **options) == vm.kid(torch.from_numpy(x), y, **options)
    )
    assert vm.inception_score(mapped, splits=2) == vm.inception_score(x, splits=2)


def test_blocks_do_not_change_results(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(50, 5)), rng.normal(size=(41, 5))
    unit = x / np.linalg.norm(x, axis=1, keepdims=True)
    unit_y = y / np.linalg.norm(y, axis=1, keepdims=True)
    before = (vm.prdc(x, y), vm.cmmd(unit, unit_y), vm.inception_score(x, splits=2))
    for module in ("mmd", "prdc", "inception_score"):  # functions of the same names hide the modules
        monkeypatch.setattr(sys.modules[f"visacc.metrics.{module}"], "BLOCK", 7)
    after = (vm.prdc(x, y), vm.cmmd(unit, unit_y), vm.inception_score(x, splits=2))
    assert before[0] == after[0]
    assert after[1] == pytest.approx(before[1], rel=1e-12)
    assert after[2] == pytest.approx(before[2], rel=1e-12)


def test_strict_border_excludes_ties() -> None:
    real = np.array([[0.0], [1.0], [2.0], [3.0]])
    on_border = np.array([[-1.0], [4.0]])  # exactly one radius away from the outer points
    assert vm.prdc(on_border, real, k=1).precision == 1.0
    assert vm.prdc(on_border, real, k=1, strict=True).precision == 0.0


def test_sorted_labels_warn_for_adms_inception_score() -> None:
    logits = np.random.default_rng(0).normal(size=(120, 6))
    with pytest.warns(UserWarning, match="sorted by class"):
        vm.inception_score_adm(logits, split_size=50, labels=np.repeat(np.arange(6), 20))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        vm.inception_score_adm(logits, split_size=50, labels=np.tile(np.arange(6), 20))


# ---------------------------------------------------------------- equality tests


def test_permutation_test_holds_its_level_and_has_power() -> None:
    """Level 0.1, 100 equal pairs: more than 22 rejections has probability below 2e-4 (binomial); seeds
    are fixed.
    """
    rng = np.random.default_rng(0)
    rejected = sum(
        mmd_permutation_test(
            rng.normal(size=(15, 3)), rng.normal(size=(15, 3)), permutations=99, seed=i
        ).rejects(0.1)
        for i in range(100)
    )
    assert rejected <= 22
    moved = mmd_permutation_test(rng.normal(size=(40, 3)), rng.normal(size=(40, 3)) + 1.5, permutations=199)
    assert moved.p_value == pytest.approx(1 / 200)
    with pytest.raises(ValueError, match="at least 2 rows"):
        mmd_permutation_test(np.ones((1, 2)), np.ones((5, 2)))


def test_token_test_holds_its_level_and_has_power() -> None:
    """Level 0.05, 200 equal pairs of independent positions: more than 25 rejections has probability below
    1e-4.
    """
    rng = np.random.default_rng(1)
    law = rng.dirichlet(np.ones(12) * 0.7, size=6)

    def draw(n: int) -> torch.Tensor:
        return torch.from_numpy(np.stack([rng.choice(12, size=n, p=p) for p in law], axis=1))

    rejected = sum(token_test(draw(300), draw(200), 12).rejects(0.05) for _ in range(200))
    assert rejected <= 25
    other = draw(300)
    other[:, 2] = 11 - other[:, 2]
    assert token_test(draw(300), other, 12).p_value < 1e-6
    with pytest.raises(ValueError, match=r"codes outside 0\.\.11"):
        token_test(draw(5), draw(5) + 12, 12)
    with pytest.raises(ValueError, match="give more samples"):
        token_test(draw(3), draw(3), 12)


# ---------------------------------------------------------------- protocols and metric classes


def test_protocols_keep_numbers_apart() -> None:
    base = Protocol("fid", "inception", "abc", "tf1-299-tf", reference="coco#1", n_ref=5000, n_gen=5000)
    clean = Protocol("fid", "inception", "abc", "clean-299-tf", reference="coco#1", n_ref=5000, n_gen=5000)
    a, b, c = Score(30.0, base), Score(31.0, base), Score(29.0, clean)
    assert difference(b, a) == 1.0
    with pytest.raises(ValueError, match="not comparable"):
        difference(a, c)
    assert [len(v) for v in columns([a, c, b]).values()] == [2, 1]
    again = Score.from_json(json.loads(json.dumps(Score(1.5, base.with_settings(k=3), 0.1, (1, 2), {"x": 1}, ("w",)).to_json())))  # noqa: E501  # fmt: skip
    assert again == Score(1.5, base.with_settings(k=3), 0.1, (1, 2), {"x": 1}, ("w",))
    assert "tf1-299-tf" in str(a)
    assert "5000v5000" in str(a)


def test_papers_are_selectable() -> None:
    assert {"sjd-coco5k", "gigagan-coco5k", "gigagan-coco30k", "adm-in256", "fidelity-in256"} <= set(PAPERS)
    assert recipe("gigagan-coco5k").images == "center-crop-lanczos-256"
    assert recipe("sjd-coco5k").check_counts(5000, 5000) is None
    assert "4999 generated images instead of 5000" in (recipe("sjd-coco5k").check_counts(4999, 5000) or "")
    with pytest.raises(ValueError, match="unknown protocol 'fid'; known: sjd-coco5k"):
        recipe("fid")


def test_metric_classes_agree_with_the_functions() -> None:
    real, fake, net = pictures(60, 1), pictures(45, 2, shift=0.2), Patches()
    x, y = net(fake)["features"], net(real)["features"]
    fid = vm.FID(net, reference="toy")
    for i in range(0, 60, 7):
        fid.update(real[i : i + 7], real=True)
    fid.update(fake[:20].float() / 255)  # [0, 1] floats give the same bytes
    fid.update(list(fake[20:]))
    score = fid.compute()
    assert score.value == pytest.approx(vm.frechet_from_features(x, y), rel=1e-9)
    assert (score.protocol.n_gen, score.protocol.n_ref) == (45, 60)
    assert score.protocol.reference.startswith("toy#")
    kid = vm.KernelDistance(net, subsets=3, subset_size=20)
    kid.update(fake)
    kid.update(real, real=True)
    assert kid.compute().value == vm.kid(x, y, subsets=3, subset_size=20).mean
    manifold = vm.Manifold(net)
    manifold.update(fake)
    manifold.update_features(y, real=True)
    want = vm.prdc(x, y)
    assert [s.value for s in manifold.compute()] == [want.precision, want.recall, want.density, want.coverage]
    isc = vm.InceptionScore(net, splits=2)
    isc.update(fake)
    assert isc.compute().value == vm.inception_score(net(fake)["logits"], splits=2)[0]
    mind = vm.MIND(net)
    mind.update(fake)
    mind.update(real, real=True)
    assert mind.compute().value == vm.mind(x, y)


def test_states_merge_and_reset() -> None:
    real, fake, net = pictures(30, 1), pictures(40, 2), Patches()
    for make in (vm.FID, lambda e: vm.KernelDistance(e, subsets=2, subset_size=10)):
        whole, parts = make(net), [make(net) for _ in range(3)]
        whole.update(fake)
        whole.update(real, real=True)
        for i, part in enumerate(parts):
            part.update(fake[i * 14 : (i + 1) * 14])
            part.update(real[i * 10 : (i + 1) * 10], real=True)
        parts[0].merge_state(parts[1:])
        assert parts[0].compute().value == pytest.approx(whole.compute().value, rel=1e-10)
        whole.reset()
        with pytest.raises(ValueError, match=r"at least 2 images, got 0|no generated images"):
            whole.compute()
        with pytest.raises(ValueError, match="cannot merge"):
            whole.merge_state(make(Patches("other")))


def test_metric_refusals(tmp_path: Path) -> None:
    net = Patches()
    fid = vm.FID(net)
    fid.update(pictures(1, 0))
    fid.update(pictures(5, 0), real=True)
    with pytest.raises(ValueError, match="at least 2 images, got 1"):
        fid.compute()
    np.savez(tmp_path / "other.npz", mu=np.zeros(2048), sigma=np.eye(2048))
    with pytest.raises(ValueError, match=r"2048 dimensions.*another extractor"):
        vm.FID(net, statistics=tmp_path / "other.npz")
    with pytest.raises(ValueError, match="needs the head 'spatial'"):
        vm.SFID(net)
    given = vm.FID(net, statistics=FeatureStats.of(net(pictures(40, 3))["features"]).gaussian())
    with pytest.raises(ValueError, match="given already"):
        given.update(pictures(2, 0), real=True)
    with pytest.raises(ValueError, match="expected rows of 27"):
        given.update_features(torch.zeros(3, 5))
    gen = FeatureSet(1, net.id, "", {"features": np.zeros((1, 27))})
    with pytest.raises(ValueError, match="at least 2 images are needed, got 1"):
        compute(["fid"], net, gen, gen)
    with pytest.raises(ValueError, match="unknown metrics nope"):
        compute(["nope"], net, gen, gen)
    with pytest.raises(ValueError, match="compares with a reference set"):
        compute(["kid"], net, FeatureSet(5, net.id, "", {"features": np.zeros((5, 27))}), None)


def test_warnings_travel_with_the_score() -> None:
    fid = vm.FID(Patches())
    fid.update(pictures(10, 0))
    fid.update(pictures(50, 1), real=True)
    score = fid.compute()
    assert len(score.warnings) == 1
    assert "10 images for 27-d features" in score.warnings[0]
    assert score.details["expected_bias"] > 0


def test_core_install_imports_without_the_eval_extra() -> None:
    """None of the optional libraries may be imported by `import visacc.metrics`, nor be needed for
    statistics.
    """
    code = """
import sys
blocked = {"torch_fidelity", "timm", "open_clip", "torchvision", "accelerate", "scipy", "yaml"}
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in blocked:
            raise ImportError(name)
sys.meta_path.insert(0, Block())
import numpy as np, visacc.metrics as vm, visacc.metrics.geneval, visacc.eval.run
x = np.random.default_rng(0).normal(size=(40, 4))
assert abs(vm.frechet_from_features(x, x)) < 1e-10
try:
    vm.create_extractor("inception")
except ImportError as error:
    assert "visacc[eval]" in str(error), error
else:
    raise SystemExit("no error without torch-fidelity")
from visacc.metrics.equality import token_test
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
