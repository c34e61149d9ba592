"""Memory that runs out, and pictures that depend neither on the batch nor on how it is cut."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from eval_runs import StandIn, config
from neighbour_cases import random_tables
from PIL import Image
from test_eagle import drafter_for
from tiny import tiny_llamagen

from visacc import memory
from visacc.eval import config as eval_config
from visacc.eval.run import run
from visacc.eval.world import World
from visacc.memory import in_batches, out_of_memory
from visacc.pipeline import TextToImagePipeline
from visacc.speculate.pipeline import CaptionPipeline


def test_batches_are_halved() -> None:
    """Every item once and in order, at the largest size that fits; the smaller size stays."""
    tried: list[tuple[int, int]] = []

    def work(start: int, stop: int) -> list[int]:
        tried.append((start, stop))
        if stop - start > 3:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return list(range(start, stop))

    with pytest.warns(UserWarning, match="do not fit") as said:
        done = list(in_batches(11, 8, work))
    assert [i for _, _, part in done for i in part] == list(range(11))
    assert tried == [(0, 8), (0, 4), (0, 2), (2, 4), (4, 6), (6, 8), (8, 10), (10, 11)]
    assert "8 images at a time do not fit into memory: going on with 4" in str(said[0].message)
    assert len(said) == 2


def test_one_item_that_does_not_fit() -> None:
    def work(start: int, stop: int) -> None:
        raise RuntimeError(
            "[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory: you tried"
        )

    with (
        pytest.warns(UserWarning, match="do not fit"),
        pytest.raises(torch.OutOfMemoryError, match="not even one of the images fits"),
    ):
        list(in_batches(4, 4, work))


def test_other_errors_are_not_taken_for_it() -> None:
    def work(start: int, stop: int) -> None:
        raise RuntimeError("shape mismatch")

    with pytest.raises(RuntimeError, match="shape mismatch"):
        list(in_batches(4, 4, work))
    assert not out_of_memory(ValueError("out of memory"))
    assert out_of_memory(MemoryError())


def short_of_memory(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, most: int, rows: Callable[..., int]
) -> list[int]:
    """Calls with more than ``most`` rows run out of memory; returns the sizes that were tried."""
    call, tried = getattr(owner, name), []

    def limited(*args: Any, **kwargs: Any) -> Any:
        tried.append(rows(*args, **kwargs))
        if tried[-1] > most:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return call(*args, **kwargs)

    monkeypatch.setattr(owner, name, limited)
    return tried


@pytest.mark.parametrize("decoder", ["ar", "mc-sjd", "sjd", "gsd", "zipar", "pjd", "sjd-pac", "eagle"])
@pytest.mark.filterwarnings("ignore:.*do not fit into memory")
def test_generation_goes_on_with_the_same_images(decoder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory runs out in the first forward, in the middle of a batch, and in the pixel decoder."""
    options: dict[str, Any] = {"drafter": drafter_for(tiny_llamagen(grid=4))} if decoder == "eagle" else {}
    labels = [1, 2, 3, 4, 5, 6, 7]
    pipe = TextToImagePipeline(tiny_llamagen(grid=4), decoder, **options)
    whole = pipe(labels, seed=3, batch_size=4, guidance_scale=2.0, output_type="np")
    for name, rows in (("prefill", lambda cond, **_: cond.batch), ("decode", lambda codes: len(codes))):
        with monkeypatch.context() as patch:
            tried = short_of_memory(patch, pipe.model, name, 2, rows)
            again = pipe(labels, seed=3, batch_size=4, guidance_scale=2.0, output_type="np")
        assert tried[0] == 4
        assert max(tried[1:]) == 2
        assert torch.equal(again.codes, whole.codes)
        assert (again.images == whole.images).all()
        assert again.seeds == whole.seeds
        assert torch.equal(again.stats.steps, whole.stats.steps)
    calls = 0
    forward = pipe.model.forward

    def late(state: Any, proposal: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if state.batch > 1 and calls > 3:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 7 bytes.")
        return forward(state, proposal, **kwargs)

    monkeypatch.setattr(pipe.model, "forward", late)
    again = pipe(labels, seed=3, batch_size=4, guidance_scale=2.0, output_type="codes")
    assert torch.equal(again.codes, whole.codes)


@pytest.mark.filterwarnings("ignore:.*do not fit into memory")
def test_an_evaluation_goes_on_with_the_same_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks are decoded as one batch of the configured size; one that does not fit is halved."""
    pipe = TextToImagePipeline(tiny_llamagen(grid=4))

    def settings(output: Path) -> eval_config.Config:
        data = {"model": "x", "prompts": "labels:6x2", "batch_size": 12, "seed": 4, "decoders": ["ar"]}
        return eval_config.parse(data, output=output)

    for name, most in (("whole", 100), ("short", 5)):
        with monkeypatch.context() as patch:
            tried = short_of_memory(patch, pipe.model, "prefill", most, lambda cond, **_: cond.batch)
            run(settings(tmp_path / name), world=World(), quiet=True, build=lambda cell: pipe)
        assert tried[0] == 12
    assert tried == [12, 6, 3, 3, 3, 3]
    pictures = [{p.name: p.read_bytes() for p in (tmp_path / n).rglob("*.png")} for n in ("whole", "short")]
    assert len(pictures[0]) == 12
    assert pictures[0] == pictures[1]


@pytest.mark.filterwarnings("ignore:.*do not fit into memory")
def test_captions_go_on_with_the_same_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    from visacc.models.vlm.scenes import draw_scene, picture

    pictures = [Image.fromarray(picture(draw_scene(20_000 + i, held_out=True))) for i in range(5)]
    try:
        pipeline = CaptionPipeline()
    except ValueError as error:
        pytest.skip(str(error))
    call = {"seed": 3, "temperature": 1.0, "max_new_tokens": 12, "prompts": "describe the image ."}
    whole = pipeline(pictures, batch_size=4, **call)
    tried = short_of_memory(
        monkeypatch, pipeline.speculator, "run", 2, lambda inputs, *_, **__: len(inputs["input_ids"])
    )
    again = pipeline(pictures, batch_size=4, **call)
    assert tried == [4, 2, 2, 1]
    assert [c.text for c in again] == [c.text for c in whole]
    assert all(c.error is None for c in again)


LIMITED = """
import resource, sys, warnings
import torch
from tiny import tiny_llamagen
from visacc.pipeline import TextToImagePipeline

pipe = TextToImagePipeline(tiny_llamagen(grid=8))
labels = [i % 10 for i in range(int(sys.argv[1]))]
small = pipe(labels, seed=1, batch_size=8, output_type="codes")  # also warms everything up
used = int(next(l for l in open("/proc/self/status") if l.startswith("VmSize")).split()[1]) << 10
resource.setrlimit(resource.RLIMIT_AS, (used + (int(sys.argv[2]) << 20),) * 2)
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    large = pipe(labels, seed=1, batch_size=len(labels), output_type="codes")
said = [str(w.message) for w in said if "do not fit" in str(w.message)]
print(len(said), int(torch.equal(small.codes, large.codes)), said[:1])
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits of memory are Linux's")
def test_the_allocators_own_error(tmp_path: Path) -> None:
    """No imitation: the process may take 48 MB more, one batch of 512 needs several times that."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(__file__).parent),
        "OMP_NUM_THREADS": "1",
        "MALLOC_ARENA_MAX": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, "512", "48"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    halved, equal, first = done.stdout.split(maxsplit=2)
    assert int(halved) >= 1, done.stdout
    assert int(equal) == 1
    assert "512 images at a time do not fit into memory: going on with 256" in first


@pytest.mark.gpu
def test_a_gpus_own_error() -> None:
    device = torch.device("cuda")
    model = tiny_llamagen(grid=8)
    model.gpt.to(device)
    model.vq.to(device)
    pipe = TextToImagePipeline(model)
    labels = [i % 10 for i in range(2048)]
    small = pipe(labels, seed=1, batch_size=64, output_type="codes")
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + (64 << 20)) / total)
    try:
        with pytest.warns(UserWarning, match="do not fit into memory"):
            large = pipe(labels, seed=1, batch_size=2048, output_type="codes")
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert (
        float((small.codes == large.codes).float().mean()) > 0.9
    )  # the last bits may differ between batch sizes


def test_memory_is_let_go_before_the_next_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tensors of a failed attempt hang on its traceback; they must be gone when the smaller one starts."""
    import weakref

    held: list[weakref.ref[torch.Tensor]] = []
    alive: list[int] = []
    monkeypatch.setattr(memory.gc, "collect", lambda: 0)  # reference counts alone must do

    def work(start: int, stop: int) -> None:
        alive.append(sum(ref() is not None for ref in held))
        tensor = torch.zeros(1000)
        held.append(weakref.ref(tensor))
        if stop - start > 1:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    with pytest.warns(UserWarning, match="do not fit"):
        list(in_batches(4, 4, work))
    assert alive == [0] * 6


# ---- the same whatever the batch, the processes and the interruptions --------------------------------------
DRAFTED = ("eagle", "lantern", "lantern++")


def with_parts(model: Any, decoder: str) -> dict[str, Any]:
    """Options that let a decoder use what it needs: a drafter, neighbour tables; settings at which they matter."""
    if decoder == "nc-sjd":
        return {"tables": random_tables(model), "window": 6}
    if decoder not in DRAFTED:
        return {}
    relaxed = {"lantern": {"k": 8, "delta": 0.4}, "lantern++": {"k": 8, "lam": 10.0}}
    return {"drafter": drafter_for(model), **relaxed.get(decoder, {})}


@pytest.mark.parametrize(
    "decoder", ["ar", "sjd", "mc-sjd", "gsd", "zipar", "pjd", "sjd-pac", "nc-sjd", *DRAFTED]
)
def test_pictures_do_not_depend_on_the_batch(decoder: str) -> None:
    labels = [i % 10 for i in range(13)]
    model = tiny_llamagen(grid=4)
    pipe = TextToImagePipeline(model, decoder, **with_parts(model, decoder))
    outs = [
        pipe(labels, seed=9, batch_size=b, guidance_scale=2.0, output_type="codes") for b in (1, 2, 5, 13)
    ]
    for other in outs[1:]:
        assert torch.equal(other.codes, outs[0].codes)
        assert torch.equal(other.stats.steps, outs[0].stats.steps)
    if decoder in DRAFTED:
        assert int(outs[0].stats.steps.sum()) < 13 * 16, "no draft was accepted"
    if decoder.startswith(
        "lantern"
    ):  # its rule matters: the exact one with the same drafts draws other pictures
        strict = TextToImagePipeline(model, "eagle", drafter=pipe.current_decoder().drafter)
        assert not torch.equal(
            strict(labels, seed=9, guidance_scale=2.0, output_type="codes").codes, outs[0].codes
        )


@pytest.mark.parametrize("coupling", ["maximal", "gumbel", "gumbel-exact"])
def test_corrected_laws_do_not_depend_on_the_batch(coupling: str) -> None:
    """The tables change what is drawn or in how many steps: they are not idle in the test above."""
    labels = [i % 10 for i in range(9)]
    model = tiny_llamagen(grid=4)
    call: dict[str, Any] = {"seed": 2, "guidance_scale": 2.0, "output_type": "codes"}
    pipe = TextToImagePipeline(model, "nc-sjd", tables=random_tables(model), window=6, coupling=coupling)
    outs = [pipe(labels, batch_size=b, **call) for b in (1, 4, 9)]
    for other in outs[1:]:
        assert torch.equal(other.codes, outs[0].codes)
        assert torch.equal(other.stats.steps, outs[0].stats.steps)
    idle = TextToImagePipeline(model, "mc-sjd", window=6, coupling=coupling)(labels, **call)
    assert not torch.equal(idle.stats.steps, outs[0].stats.steps)


def test_standin_counts_batches(tmp_path: Path) -> None:
    """Third-party pipelines are called with a chunk at a time and no batch size of ours."""
    made = StandIn("a")
    run(config(tmp_path / "out", decoders={"one": {"decoder": "a"}}, metrics=[]), world=World(), quiet=True,
        build=lambda cell: made)  # fmt: skip
    assert [len(call) for call in made.calls] == [4] * 6
