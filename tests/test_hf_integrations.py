"""custom_generate, attach, the diffusers pipeline and GLM-Image prior tokens on tiny checkpoints."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import hf_tiny
import numpy as np
import pytest
import torch
import transformers
from torch import Tensor

import visacc
from visacc.decoders import AR, MCSJD, SJD
from visacc.integrations.constraint import probe_layout, read_processors, rows_of
from visacc.integrations.glm_image import prior_tokens
from visacc.models.hf import load_hf


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("tiny")
    return {name: build(root / name) for name, build in hf_tiny.BUILDERS.items()}


class Prepared:
    """A model with the inputs of a text-to-image call to ``generate``."""

    def __init__(self, folder: Path) -> None:
        self.adapter: Any = load_hf(folder)
        self.model: Any = self.adapter.module
        cond = self.adapter.encode(["a red circle", "two"])
        self.ids, mask = cond.data["ids"], cond.data["mask"].long()
        self.inputs = {
            "input_ids": self.ids,
            "attention_mask": mask,
            "negative_prompt_ids": cond.data["uncond_ids"],
            "negative_prompt_attention_mask": cond.data["uncond_mask"].long(),
            "guidance_scale": 3.0,
            "max_new_tokens": self.adapter.layout.total,
            "eos_token_id": None,
        }

    def rule(self, _row: int, ids: Tensor) -> list[int]:
        forced = self.adapter.layout.forced[len(ids) - self.ids.shape[1]]
        return [forced] if forced >= 0 else self.adapter.code_ids.tolist()


@pytest.fixture(scope="module")
def emu3(folders: dict[str, Path]) -> Prepared:
    return Prepared(folders["emu3"])


# -- generate(custom_generate=decoder) ----------------------------------------------------------------------


def test_greedy_is_that_of_generate(emu3: Prepared) -> None:
    plain = emu3.model.generate(**emu3.inputs, prefix_allowed_tokens_fn=emu3.rule, do_sample=False)
    for decoder in (AR(), SJD(window=8), MCSJD(window=32)):
        found = emu3.model.generate(
            **emu3.inputs, prefix_allowed_tokens_fn=emu3.rule, do_sample=False, custom_generate=decoder
        )
        assert torch.equal(found, plain)


def test_chameleon_through_generate(folders: dict[str, Path]) -> None:
    case = Prepared(folders["lumina-mgpt"])
    found = case.model.generate(
        **case.inputs, prefix_allowed_tokens_fn=case.rule, do_sample=False, custom_generate=MCSJD(window=8)
    )
    assert "image_tokens" not in vars(case.model.model.vocabulary_mapping)  # nothing was patched
    case.model.model.vocabulary_mapping.image_tokens = []
    plain = case.model.generate(**case.inputs, prefix_allowed_tokens_fn=case.rule, do_sample=False)
    assert torch.equal(found, plain)


def test_seeds_grid_and_outputs(emu3: Prepared) -> None:
    options = {**emu3.inputs, "do_sample": True, "top_k": 0, "temperature": 0.8}
    by_rule = emu3.model.generate(
        **options, prefix_allowed_tokens_fn=emu3.rule, custom_generate=MCSJD(window=4), seed=7
    )
    by_grid = emu3.model.generate(**options, custom_generate=MCSJD(window=4), seed=7, grid=(3, 4))
    assert torch.equal(by_rule, by_grid)
    other = emu3.model.generate(**options, custom_generate=MCSJD(window=4), seed=8, grid=(3, 4))
    assert not torch.equal(other, by_grid)
    torch.manual_seed(3)
    one = emu3.model.generate(**options, custom_generate=SJD(window=4), grid=(3, 4))
    torch.manual_seed(3)
    again = emu3.model.generate(
        **options, custom_generate=SJD(window=4), grid=(3, 4), return_dict_in_generate=True
    )
    assert torch.equal(one, again.sequences)
    steps: list[int] = []
    emu3.model.generate(
        **options, custom_generate=AR(), grid=(3, 4), seed=1, callback=lambda info: steps.append(info.step)
    )
    assert steps == list(range(1, emu3.adapter.layout.total + 1))


def test_sampling_law_is_that_of_generate(emu3: Prepared) -> None:
    """First-token frequencies of 400 draws under top-k and top-p: same support, close frequencies."""
    options = {k: v for k, v in emu3.inputs.items() if k != "max_new_tokens"}
    options |= {"do_sample": True, "top_k": 6, "top_p": 0.9, "temperature": 1.3}
    options |= {k: v[:1].repeat(400, 1) for k, v in emu3.inputs.items() if isinstance(v, Tensor)}
    torch.manual_seed(0)
    rule = emu3.rule
    stock = emu3.model.generate(**options, prefix_allowed_tokens_fn=rule, max_new_tokens=1)[:, -1]
    ours = emu3.model.generate(
        **options,
        prefix_allowed_tokens_fn=rule,
        max_new_tokens=emu3.adapter.layout.total,
        custom_generate=MCSJD(window=6),
    )[:, emu3.ids.shape[1]]
    count = emu3.model.config.text_config.vocab_size
    a, b = torch.bincount(stock, minlength=count) / 400, torch.bincount(ours, minlength=count) / 400
    assert float((a - b).abs().sum()) < 0.25
    assert 1 < int((b > 0).sum()) <= 6


def test_silent_top_k_is_named(emu3: Prepared) -> None:
    with pytest.warns(UserWarning, match="top_k=50"):
        emu3.model.generate(**emu3.inputs, do_sample=True, custom_generate=AR(), grid=(3, 4), seed=1)


def test_refusals(emu3: Prepared, folders: dict[str, Path]) -> None:
    def call(**more: Any) -> Any:
        options = {**emu3.inputs, "do_sample": False, "custom_generate": AR(), **more}
        return emu3.model.generate(**options)

    with pytest.raises(ValueError, match=r"pass grid=\(rows, columns\)"):
        call()
    with pytest.raises(ValueError, match="max_new_tokens leaves 4"):
        call(grid=(3, 4), max_new_tokens=4)
    with pytest.raises(ValueError, match="RepetitionPenaltyLogitsProcessor"):
        call(grid=(3, 4), repetition_penalty=1.3)
    with pytest.raises(ValueError, match="image codes there"):
        call(prefix_allowed_tokens_fn=lambda _b, _i: emu3.adapter.code_ids.tolist()[:5])
    with pytest.raises(ValueError, match="stopping criterion MaxTimeCriteria"):
        call(grid=(3, 4), max_time=5.0)
    end = emu3.adapter.code_ids.tolist()

    def content(_row: int, ids: Tensor) -> list[int]:
        picked = len(ids) > emu3.ids.shape[1] and int(ids[-1]) != end[0]
        return [emu3.adapter.boi] if picked and len(ids) == emu3.ids.shape[1] + 1 else end

    with pytest.raises(ValueError, match="depends on the codes drawn before"):
        call(prefix_allowed_tokens_fn=content, max_new_tokens=6, guidance_scale=1.0)
    words = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=20
    )
    plain = transformers.LlamaForCausalLM(words)
    with pytest.raises(ValueError, match="has no image tokens"):
        plain.generate(torch.ones(1, 3, dtype=torch.long), custom_generate=AR(), max_new_tokens=3)
    janus = transformers.JanusForConditionalGeneration.from_pretrained(folders["janus"])
    with pytest.raises(ValueError, match=r"visacc\.attach"):
        janus.generate(torch.ones(1, 3, dtype=torch.long), custom_generate=AR(), max_new_tokens=16)


def test_processors_are_read_not_changed(emu3: Prepared) -> None:
    from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper

    given = LogitsProcessorList([TemperatureLogitsWarper(0.7), TopKLogitsWarper(5)])
    found = read_processors(given, {1})
    assert found.sampling == {"temperature": 0.7, "top_k": 5}
    assert len(given) == 2


def test_probed_layouts() -> None:
    ids, prompts = torch.arange(10, 14), torch.zeros(2, 3, dtype=torch.long)

    def rule(_row: int, prefix: Tensor) -> list[int]:
        slot = len(prefix) - 3
        return [7] if slot % 4 == 3 else [9] if slot == 8 else ids.tolist()

    layout = probe_layout(rule, prompts, ids, {9}, 30)
    assert layout.grid == (1, 2, 3)
    assert layout.forced == (-1, -1, -1, 7, -1, -1, -1, 7, 9)
    with pytest.raises(ValueError, match="different sizes"):
        probe_layout(lambda r, p: [9] if len(p) == 5 + r else ids.tolist(), prompts, ids, {9}, 30)
    assert rows_of((-1, -1, 5, -1)) == (1, 3)


# -- attach -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["janus", "emu3", "chameleon"])
def test_attach(family: str, folders: dict[str, Path]) -> None:
    adapter: Any = load_hf(folders[family])
    model, tokenizer = adapter.module, adapter.tokenizer
    before = {name: p.clone() for name, p in model.named_parameters()}
    model.train()
    members = set(vars(model))
    more = {"vq": adapter.vq} if family == "chameleon" else {}
    with visacc.attach(model, decoder="mc-sjd", tokenizer=tokenizer, window=6, **more) as run:
        assert not model.training
        codes = run.generate_codes(["a red circle", "two"], seed=4, guidance_scale=2.0)
        assert codes.shape == (2, *adapter.layout.grid[1:])
        assert run.stats is not None
        assert len(run.stats.steps) == 2
        images = run.to_images(codes)
        floats = run.to_images(codes, "pt")
        assert images[0].size == (floats.shape[3], floats.shape[2])
        ids = adapter.prompt_ids("two")
        alone = run.generate_codes([ids], seed=[run.pipe("two", seed=9, output_type="codes").seeds[0]])
        assert torch.equal(alone, run.generate_codes("two", seed=9))
    assert model.training
    assert set(vars(model)) == members
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_attach_restores_the_attention(folders: dict[str, Path]) -> None:
    model = transformers.Emu3ForConditionalGeneration.from_pretrained(folders["emu3"])
    model.model.text_model.config._attn_implementation = "flex_attention"
    with visacc.attach(model, decoder="ar") as run:
        assert run.pipe.model.attention_implementation == "sdpa"  # type: ignore[attr-defined]
    assert model.model.text_model.config._attn_implementation == "flex_attention"


# -- diffusers ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["janus", "emu3", "chameleon", "lumina-mgpt", "emu3.5"])
def test_diffusers_pipeline(family: str, folders: dict[str, Path], tmp_path: Path) -> None:
    pytest.importorskip("diffusers")
    pipe = visacc.ARImagePipeline.from_pretrained(folders[family], decoder="sjd", window=5)
    pipe.set_progress_bar_config(disable=True)
    seen: list[tuple[int, int]] = []

    def step(_pipe: Any, number: int, committed: int, tensors: dict[str, Any]) -> dict[str, Any]:
        seen.append((number, committed))
        assert set(tensors) == {"token_ids", "accepted"}
        return {}

    out = pipe(
        ["a red circle", "two"],
        seed=5,
        output_type="np",
        callback_on_step_end=step,
        callback_on_step_end_tensor_inputs=["token_ids", "accepted"],
    )
    assert [n for n, _ in seen] == list(range(1, len(seen) + 1))
    assert out.images.dtype == np.float32
    assert out.images.shape[-1] == 3
    pipe.save_pretrained(tmp_path / "saved")
    again = visacc.ARImagePipeline.from_pretrained(tmp_path / "saved")
    again.set_progress_bar_config(disable=True)
    assert again.config.decoder == "sjd"
    assert again.config.decoder_options == {"window": 5}
    repeat = again(["a red circle", "two"], seed=5, output_type="latent", return_dict=False)[0]
    assert torch.equal(repeat, out.token_ids)
    pictures = again("a red circle", seed=5, num_images_per_prompt=2).images
    assert [p.size for p in pictures] == [(out.images.shape[2], out.images.shape[1])] * 2
    generator = torch.Generator().manual_seed(1)
    one = pipe("two", generator=generator, output_type="latent").images
    other = pipe("two", generator=torch.Generator().manual_seed(1), output_type="latent").images
    assert torch.equal(one, other)


@pytest.mark.parametrize("family", ["janus", "emu3", "chameleon"])
def test_diffusers_offload(family: str, folders: dict[str, Path]) -> None:
    pytest.importorskip("diffusers")
    accelerate = pytest.importorskip("accelerate")

    def load() -> Any:
        pipe = visacc.ARImagePipeline.from_pretrained(folders[family], decoder="sjd", window=4)
        pipe.set_progress_bar_config(disable=True)
        return pipe

    wanted = load()("two", seed=1, output_type="pt").images
    whole = load()
    whole.enable_model_cpu_offload(device="cpu")
    assert type(whole.model._hf_hook).__name__ == "CpuOffload"
    layers = load()  # what enable_sequential_cpu_offload does on a GPU
    accelerate.cpu_offload(layers.model, torch.device("cpu"), offload_buffers=True)
    assert next(layers.model.parameters()).is_meta
    for pipe in (whole, layers):
        for _ in range(2):
            assert torch.equal(pipe("two", seed=1, output_type="pt").images, wanted)


def test_diffusers_interrupt_and_errors(folders: dict[str, Path]) -> None:
    pytest.importorskip("diffusers")
    pipe = visacc.ARImagePipeline.from_pretrained(folders["emu3"], decoder="ar")
    pipe.set_progress_bar_config(disable=True)

    def stop(p: Any, number: int, _committed: int, _tensors: dict[str, Any]) -> None:
        p.interrupt = number == 3

    out = pipe("two", seed=1, output_type="latent", callback_on_step_end=stop)
    assert out.stats.unfinished
    assert out.stats.forwards == 3
    with pytest.raises(ValueError, match="output_type"):
        pipe("two", output_type="jpeg")
    with pytest.raises(ValueError, match="both height and width"):
        pipe("two", height=8)
    with pytest.raises(ValueError, match="callback tensors"):
        pipe("two", callback_on_step_end=stop, callback_on_step_end_tensor_inputs=["latents"])
    with pytest.raises(ValueError, match="prior_tokens"):
        visacc.ARImagePipeline.from_pretrained(folders["glm-image"])
    sized = pipe("two", height=4, width=6, seed=1)
    assert sized.images[0].size == (6, 4)


def test_diffusers_is_imported_on_use_only() -> None:
    import subprocess
    import sys

    code = "import sys, visacc, visacc.models.hf; sys.exit('diffusers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    assert importlib.import_module("visacc.integrations").__doc__


def test_without_diffusers_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.delitem(sys.modules, "visacc.integrations.diffusers_pipeline", raising=False)
    monkeypatch.setitem(sys.modules, "diffusers", None)
    with pytest.raises(ImportError, match=r"pip install 'visacc\[diffusers\]'"):
        visacc.ARImagePipeline  # noqa: B018


# -- GLM-Image ----------------------------------------------------------------------------------------------


def test_prior_tokens(folders: dict[str, Path]) -> None:
    model = transformers.GlmImageForConditionalGeneration.from_pretrained(folders["glm-image"])
    processor = transformers.AutoProcessor.from_pretrained(folders["glm-image"])
    state = torch.get_rng_state()
    tokens = prior_tokens(model, processor, "a red circle", 96, 64, decoder="sjd", window=32, seed=3)
    assert torch.equal(torch.get_rng_state(), state)
    assert tokens.shape == (1, 4 * 3 * 2)
    grid = tokens.view(6, 4)
    assert torch.equal(grid[::2, ::2], grid[1::2, 1::2])
    assert int(tokens.max()) < hf_tiny.CODES
    pipeline = pytest.importorskip("diffusers").GlmImagePipeline
    doubled = pipeline._upsample_token_ids(grid[::2, ::2].reshape(-1), 3, 2)
    assert torch.equal(doubled, tokens)
