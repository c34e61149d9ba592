"""``compile=True``: the same pictures with shapes that never change, one compilation, clear refusals."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hf_tiny
import pytest
import torch
from tiny import save_tiny, tiny_llamagen
from torch import Tensor

import visacc
from visacc.cli import main
from visacc.decoders.nc_online import forget
from visacc.engine import decode
from visacc.models import compiling
from visacc.models.base import DecodeState, ImageModel, ModelOutput, Proposal
from visacc.models.compiling import put_slots
from visacc.models.hf.loading import load_hf
from visacc.models.llamagen import LlamaGen
from visacc.pipeline import TextToImagePipeline
from visacc.registry import decoder_entries, make_decoder
from visacc.sampling import SamplingParams

SAMPLING = SamplingParams(guidance_scale=2.0, top_k=12)
SEEDS = [3, 1, 4, 15, 9]
DECODERS: list[tuple[str, dict[str, Any]]] = [
    ("ar", {}),
    ("sjd", {"window": 8}),
    ("sjd", {"window": 8, "init": "repeat_left"}),
    ("mc-sjd", {"window": 8}),
    ("mc-sjd", {"window": 64, "coupling": "maximal"}),
    ("mc-sjd", {"window": 8, "coupling": "gumbel"}),
    ("gsd", {"window": 8, "group_size": 3}),
    ("sjd-pac", {"window": 12}),
    ("nc-sjd", {"window": 8, "coupling": "gumbel-exact"}),
    ("nc-sjd", {"window": 8, "coupling": "maximal", "online": False}),
]
needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("g++", "clang++"))), reason="torch.compile on a CPU needs a C++ compiler"
)


class Watched(LlamaGen):
    """Notes the shapes that every forward is called with."""

    shapes: set[tuple[int, ...]]

    def forward(self, state: DecodeState, proposal: Proposal, *, hidden: bool = False) -> ModelOutput:
        self.shapes.add((*proposal.tokens.shape, state.limit, *state.kv.shape))
        return super().forward(state, proposal, hidden=hidden)


def watched() -> Watched:
    plain = tiny_llamagen()
    model = Watched(plain.gpt, plain.vq, name="tiny")
    model.shapes = set()
    return model


@pytest.fixture
def eager_backend(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """torch.compile without code generation: graphs are captured, functionalised and run by torch's own operators."""
    plain = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **options: plain(f, backend="aot_eager", **options))
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def draw(model: ImageModel, name: str, options: dict[str, Any], prompts: Any = (3, 1, 4, 5, 9)) -> Any:
    seeds = SEEDS[: len(prompts)]
    return decode(model, make_decoder(name, **options), model.encode(list(prompts)), SAMPLING, seeds)


@pytest.mark.parametrize(("name", "options"), DECODERS)
def test_static_shapes_change_no_picture(name: str, options: dict[str, Any]) -> None:
    """Full windows to the end, finished rows kept, the whole cache read: the same tokens, one set of shapes."""
    model = watched()
    dynamic = draw(model, name, options)
    assert len(model.shapes) > 1
    model.static_shapes, model.shapes = True, set()
    forget(model)  # nc-sjd learns from decode to decode
    static = draw(model, name, options)
    assert torch.equal(static.sequence, dynamic.sequence)
    assert torch.equal(static.stats.steps, dynamic.stats.steps)
    assert torch.equal(static.stats.step_of, dynamic.stats.step_of)
    assert len(model.shapes) == 1
    # rows did finish at different times
    assert name == "ar" or len(set(static.stats.steps.tolist())) > 1


def test_every_decoder_says_whether_it_can() -> None:
    model = tiny_llamagen()
    model.static_shapes = True
    able = {name for name, _ in DECODERS}
    for entry in decoder_entries():
        assert entry.cls.fixed_shape == (entry.name in able), entry.name
    with pytest.raises(ValueError, match="decoder 'zipar' cannot drive a compiled model"):
        make_decoder("zipar").check(model)


def test_put_slots() -> None:
    store, new = torch.zeros(2, 3, 6, 4), torch.randn(2, 3, 2, 4)
    slots = torch.tensor([[1, 4], [5, 0]])
    expected = store.clone().scatter_(2, slots[:, None, :, None].expand(new.shape), new)
    put_slots(store, slots, new)
    assert torch.equal(store, expected)


def test_one_graph_for_llamagen(eager_backend: None) -> None:
    """The window forward is captured whole, and once for all steps of a decode."""
    model = tiny_llamagen()
    expected = draw(model, "mc-sjd", {"window": 8})
    model.compile()
    torch._dynamo.utils.counters.clear()
    found = draw(model, "mc-sjd", {"window": 8})
    assert torch.equal(found.sequence, expected.sequence)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert not torch._dynamo.utils.counters["graph_break"]


@pytest.mark.parametrize("family", ["janus", "emu3", "chameleon"])
def test_transformers_models(family: str, eager_backend: None, tmp_path: Path) -> None:
    folder = getattr(hf_tiny, family)(tmp_path / family)
    prompts = ([5, 6, 7], [8, 9, 10])
    model = load_hf(folder, **({"vq": False} if family == "chameleon" else {}))
    expected = draw(model, "mc-sjd", {"window": 4}, prompts)
    model.compile()
    torch._dynamo.utils.counters.clear()
    found = draw(model, "mc-sjd", {"window": 4}, prompts)
    assert torch.equal(found.sequence, expected.sequence)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert graphs > 0
    again = draw(model, "mc-sjd", {"window": 4}, prompts)
    assert torch.equal(again.sequence, expected.sequence)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs


def test_a_gpu_gets_cuda_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch is asked for, and that every call begins a step (no GPU here: torch.compile itself is replaced)."""
    asked: list[dict[str, Any]] = []
    steps: list[int] = []
    monkeypatch.setattr(compiling, "find_spec", lambda name: object())
    monkeypatch.setattr(compiling.shutil, "which", lambda name: "/usr/bin/c++")
    monkeypatch.setattr(torch, "compile", lambda f, **options: asked.append(options) or f)
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: steps.append(1))
    assert compiling.compiled(lambda x: x + 1, torch.device("cuda"), whole=True)(2) == 3
    assert compiling.compiled(lambda x: x + 1, torch.device("cpu"), whole=True)(2) == 3
    assert asked == [{"fullgraph": True, "mode": "reduce-overhead"}, {"fullgraph": True}]
    assert steps == [1]


@pytest.mark.parametrize("kind", ["llamagen", "janus"])
@pytest.mark.slow
@needs_compiler
def test_only_fixed_memory_is_written(kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Inductor's own condition for CUDA graphs: of all inputs it writes only into those with a fixed address."""
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    found: list[tuple[set[int], set[int]]] = []

    def inner(graph: Any, inputs: Any, **options: Any) -> Any:
        made = compile_fx_inner(graph, inputs, **options)
        found.append((set(made.mutated_input_idxs), set(options.get("static_input_idxs", ()))))
        return made

    torch._dynamo.reset()
    plain = torch.compile
    backend = lambda graph, inputs: compile_fx(graph, inputs, inner_compile=inner)  # noqa: E731
    monkeypatch.setattr(torch, "compile", lambda f, **options: plain(f, backend=backend, **options))
    model = tiny_llamagen(grid=4) if kind == "llamagen" else load_hf(hf_tiny.janus(tmp_path / "janus"))
    model.compile()
    with torch._inductor.config.patch(force_disable_caches=True):  # a graph from a cache shows nothing
        step(model, [1, 2, 3] if kind == "llamagen" else [[5, 6, 7], [8, 9, 10]])
    written = [mutated for mutated, _ in found if mutated]
    assert sum(map(len, written)) == 4  # keys and values of two layers
    assert all(mutated <= fixed for mutated, fixed in found)


@pytest.mark.slow
@needs_compiler
def test_generated_code_draws_the_same_pictures(tmp_path: Path) -> None:
    """Inductor's code on a CPU: logits to 1e-4, tokens of a whole decode equal, through ``visacc.load``."""
    torch._dynamo.reset()
    folder = save_tiny(tmp_path / "model", grid=4)
    plain = visacc.load(folder, "mc-sjd", window=6)
    fast = visacc.load(folder, "mc-sjd", window=6, compile=True)
    options: dict[str, Any] = {"seed": 5, "guidance_scale": 2.0, "output_type": "codes"}
    assert torch.equal(fast([1, 2, 3], **options).codes, plain([1, 2, 3], **options).codes)

    for ours, theirs in zip(step(fast.model, [1, 2, 3]), step(plain.model, [1, 2, 3]), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def step(model: ImageModel, prompts: list[Any]) -> tuple[Tensor, Tensor]:
    """Logits of a window of six tokens behind the prompts, and the cache after it."""
    state, _ = model.prefill(model.encode(prompts), guidance=True, window=6)
    order = torch.arange(6).expand(len(prompts), -1)
    state.limit = state.kv.shape[4]
    out = model.forward(state, Proposal(order % 5, order, torch.ones_like(order, dtype=torch.bool)))
    return out.logits, state.kv


@pytest.mark.slow
@needs_compiler
def test_generated_code_of_a_transformers_model(tmp_path: Path) -> None:
    torch._dynamo.reset()
    plain, fast = (load_hf(hf_tiny.janus(tmp_path / name)) for name in ("one", "two"))
    fast.compile()
    prompts = [[5, 6, 7], [8, 9, 10]]
    for ours, theirs in zip(step(fast, prompts), step(plain, prompts), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def test_refusals(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = save_tiny(tmp_path / "model", grid=4)
    with pytest.raises(ValueError, match="decoder 'zipar' cannot drive a compiled model"):
        visacc.load(folder, "zipar", compile=True)
    pipe = TextToImagePipeline(tiny_llamagen(grid=4), "sjd", compile=True, window="auto")
    with pytest.raises(ValueError, match="window='auto' times many windows"):
        pipe(1, seed=1)
    with pytest.raises(ValueError, match="'eagle' cannot drive a compiled model"):
        pipe(1, decoder="eagle")

    class Other(Watched):
        compile = ImageModel.compile

    plain = tiny_llamagen(grid=4)
    with pytest.raises(ValueError, match="tiny cannot be compiled"):
        TextToImagePipeline(Other(plain.gpt, plain.vq, name="tiny"), compile=True)
    monkeypatch.setattr(compiling.shutil, "which", lambda name: None)
    with pytest.raises(SystemExit) as stop:
        main(["generate", "1", "-m", str(folder), "--compile", "-o", str(tmp_path / "out"), "-q"])
    assert stop.value.code == 2
    assert "needs a C++ compiler" in capsys.readouterr().err


def test_models_that_accelerate_moves_are_refused(tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    model = load_hf(hf_tiny.janus(tmp_path / "janus"), device_map={"": "cpu"})
    accelerate.cpu_offload(model.module, execution_device=torch.device("cpu"))
    with pytest.raises(ValueError, match="spread over several devices"):
        model.compile()
    model = load_hf(tmp_path / "janus", attn_implementation="visacc_tree")
    with pytest.raises(ValueError, match="brings its own kernels"):
        model.compile()
