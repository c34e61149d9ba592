"""Damaged pictures, clips, statistics, reports, run configurations and prompt files: refused in one line, in bounds."""

from __future__ import annotations

import io
import json
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from eval_runs import config as small_config
from eval_runs import prompts as clauses
from fuzzing import Canary, as_bytes, bent, damaged, memory_bound, outcome, sings, survive
from PIL import Image
from report_runs import bench_run, generate_run
from test_llamagen_files import make_text
from tiny import save_tiny

from visacc.eval.config import load_config
from visacc.eval.files import write_json
from visacc.eval.generate import Images, drop_damaged
from visacc.eval.prompts import load_prompts
from visacc.eval.reference import is_statistics, open_images
from visacc.eval.run import _check, run
from visacc.eval.table import Speed
from visacc.eval.world import World
from visacc.metrics.dpg import read_questions
from visacc.metrics.geneval import read_prompts, read_results, scan, summarise
from visacc.metrics.images import ImageFolder, file_sizes, load_image
from visacc.metrics.npz import NpzImages, load_stats, save_stats
from visacc.metrics.stats import FeatureStats
from visacc.models.hf.loading import load_hf
from visacc.models.llamagen import TextConditioner
from visacc.reading import read_array, read_arrays
from visacc.report import build
from visacc.report.pictures import load as report_picture
from visacc.report.read import load as load_report
from visacc.speculate.cli import _done
from visacc.speculate.pipeline import _read, load_vlm
from visacc.speculate.train_run import read_rows
from visacc.train.parallel import read_codes
from visacc.video_io import read_clip

CASES = 120
FORMATS = {
    "png": "PNG",
    "jpg": "JPEG",
    "webp": "WEBP",
    "bmp": "BMP",
    "tif": "TIFF",
    "ppm": "PPM",
    "gif": "GIF",
}


def noise(side: int = 12, channels: int = 3) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (side, side, channels), np.uint8)


def encoded(kind: str, image: Image.Image | None = None, **options: Any) -> bytes:
    sink = io.BytesIO()
    (image or Image.fromarray(noise())).save(sink, kind, **options)
    return sink.getvalue()


def png(width: int, height: int, *, depth: int = 8, colour: int = 2, pixels: bytes = b"") -> bytes:
    """A PNG by hand, with whatever header."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    data = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(pixels)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + data


# ---- pictures ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize("suffix", FORMATS)
def test_damaged_pictures(tmp_path: Path, suffix: str) -> None:
    """All loaders agree: a damaged picture is refused by name, or read."""
    path = tmp_path / f"picture.{suffix}"
    path.write_bytes(encoded(FORMATS[suffix]))

    def read() -> None:
        list(file_sizes([path]))  # leaves unreadable files out
        caption = _read(path, "what is it?", 0).caption
        assert caption.error is None or path.name in caption.error
        failed = []
        for reader in (load_image, report_picture, lambda p: ImageFolder([p]).read(p)):
            try:
                reader(path)
            except ValueError as error:
                failed.append(error)
        assert (caption.error is not None) == bool(failed)
        if failed:
            raise failed[0]

    with memory_bound(128):
        survive(read, path, damaged(path.read_bytes(), CASES, seed=5), least=CASES // 5)


def test_every_mode_becomes_rgb(tmp_path: Path) -> None:
    """Grey, palette, transparent, CMYK and 16-bit pictures; of 16 bits the upper eight count, nothing is clipped."""
    base = Image.fromarray(noise())
    for mode in ("1", "L", "LA", "P", "RGBA", "CMYK", "YCbCr", "LAB", "HSV", "I;16"):
        path = tmp_path / f"{mode.replace(';', '')}.{'jpg' if mode in ('CMYK', 'YCbCr') else 'tif'}"
        if mode == "I;16":
            Image.fromarray(np.arange(144, dtype=np.uint16).reshape(12, 12) * 455).save(path)
        else:
            try:
                base.convert("RGBA" if mode == "RGBA" else mode).save(path)
            except (OSError, ValueError):  # Pillow does not write, or not make, this mode
                continue
        image = load_image(path)
        assert (image.mode, image.size) == ("RGB", (12, 12))
        assert report_picture(path).tobytes() == image.tobytes()
    path = tmp_path / "deep.png"
    values = np.linspace(0, 65535, 144).astype(np.uint16).reshape(12, 12)
    Image.fromarray(values).save(path)
    grey = np.asarray(load_image(path))
    assert (grey[..., 0] == values.astype(np.int64) * 255 // 65535).all()
    assert (grey == grey[..., :1]).all()


def test_numbers_that_are_no_colours_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "numbers.tif"
    for values in (
        np.zeros((4, 4), np.float32),
        np.full((4, 4), -1, np.int32),
        np.full((4, 4), 70_000, np.int32),
    ):
        Image.fromarray(values).save(path)
        with pytest.raises(ValueError, match=r"numbers\.tif: its pixels are .* save it with 8 or 16 bits"):
            load_image(path)


def test_decompression_bombs_are_refused_by_their_header(tmp_path: Path) -> None:
    """Ten gigapixels in a few bytes, or really compressed zeros: nothing is decoded."""
    path = tmp_path / "bomb.png"
    contents = [
        png(100_000, 100_000),
        png(2**31 - 1, 1),
        png(1, 2**31 - 1),
        png(65_500, 65_500, depth=16, colour=6),
    ]
    contents.append(png(20_000, 20_000, colour=0, pixels=bytes(20_001 * 20_000)))
    for content in contents:
        path.write_bytes(content)
        with memory_bound(64):
            for read in (load_image, report_picture):
                with pytest.raises(ValueError, match=r"bomb\.png"):
                    read(path)
            assert "bomb.png" in str(_read(path, "what?", 0).caption.error)


def test_pictures_without_pixels(tmp_path: Path) -> None:
    path = tmp_path / "none.png"
    for content in (b"", png(0, 0), png(0, 5), png(5, 0), png(5, 5), b"\x89PNG\r\n\x1a\n"):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"none\.png"):
            load_image(path)
    path = tmp_path / "none.ppm"
    path.write_bytes(b"P6 0 0 255\n")
    with pytest.raises(ValueError, match=r"none\.ppm"):
        load_image(path)


def test_of_an_animation_the_first_frame_counts(tmp_path: Path) -> None:
    frames = [Image.new("RGB", (6, 6), colour) for colour in ("red", "lime", "blue")]
    for suffix in ("gif", "webp", "png"):
        path = tmp_path / f"moving.{suffix}"
        options = {"lossless": True} if suffix == "webp" else {}
        frames[0].save(path, save_all=True, append_images=frames[1:], duration=50, **options)
        assert load_image(path).getpixel((3, 3)) == (255, 0, 0)


@pytest.mark.parametrize("suffix", ["gif", "mp4"])
def test_damaged_clips(tmp_path: Path, suffix: str) -> None:
    from visacc.video_io import write_clip

    if suffix == "mp4":
        pytest.importorskip("av")
    path = tmp_path / f"clip.{suffix}"
    write_clip(np.stack([noise(16)] * 3 + [255 - noise(16)]), path, side=0)
    assert read_clip(path).shape[0] == 4
    with memory_bound(256):
        survive(
            lambda: read_clip(path), path, damaged(path.read_bytes(), CASES // 2, seed=6), least=CASES // 12
        )


def test_clips_that_would_fill_the_memory(tmp_path: Path) -> None:
    """Two frames, one of them shown for a minute and a half: equal frames are repeated, within bounds."""
    path = tmp_path / "long.gif"
    frames = [Image.fromarray(noise(400)), Image.fromarray(255 - noise(400))]
    frames[0].save(path, save_all=True, append_images=frames[1:], duration=[10, 90_000])
    with memory_bound(64), pytest.raises(ValueError, match=r"long\.gif holds a clip of more than 2 GB"):
        read_clip(path)


# ---- arrays and statistics --------------------------------------------------------------------------------
def test_damaged_statistics(tmp_path: Path) -> None:
    path = tmp_path / "stats.npz"
    save_stats(path, FeatureStats.of(np.random.default_rng(0).normal(size=(20, 4)), "net"))
    assert load_stats(path).dim == 4

    def read() -> None:
        if is_statistics(path):
            load_stats(path)

    with memory_bound(64):
        survive(read, path, damaged(path.read_bytes(), 3 * CASES, seed=7), least=CASES)


def test_damaged_sample_arrays(tmp_path: Path) -> None:
    path = tmp_path / "samples.npz"
    np.savez_compressed(path, arr_0=np.stack([noise(8)] * 5))
    assert len(list(open_images(path).batches(2))) == 3
    with memory_bound(64):
        read = lambda: list(NpzImages(path).batches(2))  # noqa: E731
        survive(read, path, damaged(path.read_bytes(), 2 * CASES, seed=8), least=CASES // 2)


def zeros(path: Path, **arrays: tuple[str, tuple[int, ...]]) -> None:
    """An ``.npz`` whose headers claim shapes; up to 128 MB of zeros stand behind each, compressed."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, (dtype, shape) in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as stream:
                header = {"descr": dtype, "fortran_order": False, "shape": shape}
                np.lib.format.write_array_header_2_0(stream, header)
                for _ in range(min(2, int(np.prod(shape, dtype=object)) >> 20)):
                    stream.write(bytes(1 << 26))


def test_statistics_of_absurd_sizes_are_refused_by_their_header(tmp_path: Path) -> None:
    path, wide = tmp_path / "wide.npz", 200_000
    for mu, sigma in (
        ((wide,), (wide, wide)),
        ((4,), (wide, wide)),
        ((2**60,), (2, 2)),
        ((2, 2**62), (2, 2)),
    ):
        zeros(path, mu=("<f8", mu), sigma=("<f8", sigma))
        with memory_bound(64), pytest.raises(ValueError, match=r"wide\.npz"):
            load_stats(path)
    zeros(path, arr_0=("|u1", (4, 200_000, 200_000, 3)))
    with memory_bound(64), pytest.raises(ValueError, match=r"wide\.npz: no image has 200000 x 200000 pixels"):
        NpzImages(path)


def test_arrays_of_objects_run_nothing(tmp_path: Path) -> None:
    canary = Canary(tmp_path / "canary")
    assert sings(canary)
    path = tmp_path / "objects.npz"
    evil = np.array([canary], dtype=object)
    good = {"mu": np.zeros(1), "sigma": np.zeros((1, 1)), "n": np.int64(3), "extractor": np.array("net")}
    for name in good:
        np.savez(path, **{**good, name: evil}, allow_pickle=True)
        with pytest.raises(ValueError, match=r"objects\.npz"):
            load_stats(path)
    np.savez(path, arr_0=evil, allow_pickle=True)
    for read in (NpzImages, read_arrays):
        with pytest.raises(ValueError, match=r"objects\.npz"):
            read(path)
    path = tmp_path / "codes.npy"
    np.save(path, evil, allow_pickle=True)
    for call in (lambda: read_array(path), lambda: read_codes(tmp_path, 8, 4)):
        with pytest.raises(ValueError, match=r"codes\.npy"):
            call()
    assert not canary.sung


def test_damaged_codes(tmp_path: Path) -> None:
    path = tmp_path / "codes.npy"
    np.save(path, np.random.default_rng(0).integers(0, 8, (5, 4)))
    assert read_codes(tmp_path, 8, 4).shape == (5, 4)
    with memory_bound(64):
        survive(
            lambda: read_codes(tmp_path, 8, 4),
            path,
            damaged(path.read_bytes(), CASES, seed=9),
            least=CASES // 3,
        )


# ---- reports ----------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One finished run of every kind; the file that a report reads first."""
    root = tmp_path_factory.mktemp("runs")
    evaluation = root / "eval"
    run(small_config(evaluation), world=World(), quiet=True)
    row = {"method": "ngram", "temperature": 0.0, "tau": 2.5, "tokens_per_second": 10.0, "draft_share": 0.1}
    row |= {"tokens_per_second_range": [9.0, 11.0], "committed_histogram": [0, 3, 2]}
    vlm = {"tau": "tokens", "rows": [row], "model": "x", "pictures": 2, "batch_size": 1, "max_new_tokens": 8}
    (root / "vlm.json").write_text(json.dumps({**vlm, "device": "cpu", "threads": 1}))
    scores = json.loads((evaluation / "summary.json").read_text())["rows"][0]["scores"]
    (root / "scores.json").write_text(json.dumps(scores))
    return {
        "bench": bench_run(root / "bench") / "decoders.json",
        "eval": evaluation / "summary.json",
        "generate": generate_run(root / "generate", save_tiny(root / "model", grid=4), "ar") / "stats.json",
        "vlm": root / "vlm.json",
        "scores": root / "scores.json",
    }


@pytest.mark.parametrize("kind", ["bench", "eval", "generate", "vlm", "scores"])
def test_damaged_reports(runs: dict[str, Path], tmp_path: Path, kind: str) -> None:
    """Bent trees and damaged bytes; some of what is read is drawn as well."""
    path, drawn = runs[kind], 0

    def read() -> None:
        nonlocal drawn
        load_report([path])
        if drawn < 3:
            drawn += 1
            build([path], tmp_path / "report.html", pictures=1)

    tree = json.loads(path.read_text())
    with memory_bound(256):
        survive(read, path, as_bytes(bent(tree, CASES, seed=10)), least=CASES // 20)
        survive(read, path, damaged(path.read_bytes(), CASES, seed=11), least=CASES // 3)


def test_damaged_parts_of_an_evaluation_run(runs: dict[str, Path]) -> None:
    """Chunks and manifests of a cell: the report names them, the run makes damaged chunks again."""
    folder = runs["eval"].parent
    cell = folder / "good"
    chunk = sorted((cell / "chunks").glob("*.json"))[0]
    for path in (chunk, cell / "manifest.json"):
        tree = json.loads(path.read_text())

        def read() -> None:
            load_report([folder])

        survive(read, path, as_bytes(bent(tree, CASES // 2, seed=12)))
        survive(read, path, damaged(path.read_bytes(), CASES // 2, seed=13), least=CASES // 8)
    original = chunk.read_bytes()
    survive(lambda: Speed.read(cell), chunk, damaged(original, CASES // 2, seed=14))
    from visacc.eval.chunks import Chunks

    settings = small_config(folder)
    prompts = load_prompts(settings.prompts)
    images = Images(cell / "images", prompts, settings.samples_per_prompt)
    chunks = Chunks(cell / "chunks", len(images), settings.batch_size)
    for content in (b"", b"{", b"[]", b'{"images": [3]}', b'{"images": [{"file": "x"}]}', original[:-9]):
        chunk.write_bytes(content)
        assert drop_damaged(cell, chunks) == 1
        assert not chunk.exists()
        chunk.write_bytes(original)
    assert drop_damaged(cell, chunks) == 0


# ---- configurations ---------------------------------------------------------------------------------------
CONFIG: dict[str, Any] = {
    "output": "out",
    "model": "shapes-t2i",
    "model_options": {"dtype": "float32"},
    "prompts": "prompts.jsonl",
    "limit": 4,
    "samples_per_prompt": 2,
    "seed": 3,
    "batch_size": 4,
    "sampling": {"guidance_scale": 2.0},
    "decoders": {"ar": None, "fast": {"decoder": "mc-sjd", "window": [8, 16]}},
    "metrics": [
        {"metric": ["fd", "kid"], "extractor": "shapes-vq", "reference": "shapes:30", "batch": 8, "kid": {"subset_size": 4}},
        {"metric": "geneval", "detector": "shapes", "thresholds": {"threshold": 0.3}},
        "is",
    ],
    "baseline": "ar",
    "bootstrap": True,
}  # fmt: skip


def checked(path: Path) -> None:
    settings = load_config(path)
    try:
        _check(settings, load_prompts(settings.prompts, settings.limit))
    except ValueError as error:  # about prompts and metrics, which have names of their own
        raise ValueError(f"{path.name}: {error}") from error


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(m) + "\n" for m in clauses()))
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(CONFIG))
    checked(path)
    return path


def test_bent_configurations(config_file: Path) -> None:
    with memory_bound(128):
        contents = as_bytes(bent(CONFIG, 5 * CASES, seed=15))
        survive(lambda: checked(config_file), config_file, contents, least=CASES)


def test_damaged_configurations(config_file: Path) -> None:
    contents = damaged(config_file.read_bytes(), 3 * CASES, seed=16)
    survive(lambda: checked(config_file), config_file, contents, least=CASES)


@pytest.mark.parametrize(
    "text",
    [
        "!!python/object/apply:pathlib.Path.touch [!!python/object/apply:pathlib.Path ['CANARY']]",
        "a: !!python/object/apply:os.system ['touch CANARY']",
        "a: !!python/object/new:os.system ['touch CANARY']",
        "a: !!python/name:os.system",
        "a: !!python/module:os",
        "!!python/object/apply:builtins.eval [\"open('CANARY', 'w')\"]",
    ],
)
def test_tags_with_code_run_nothing(tmp_path: Path, text: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text.replace("CANARY", str(tmp_path / "canary")))
    assert not outcome(lambda: load_config(path), path, text)
    assert not (tmp_path / "canary").exists()


def test_configurations_that_repeat_themselves(tmp_path: Path) -> None:
    """Nine lines that stand for a billion values, a list in itself, deep nesting, lists that span too many settings."""
    path = tmp_path / "run.yaml"
    laughs = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    laughs += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 10)]
    many = [f"o{i}: [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]" for i in range(30)]
    texts = {
        "\n".join(laughs): "values",
        "&a [*a]": "values",
        "&a {prompts: *a}": "values",
        "[" * 20_000: "YAML",
        "prompts: shapes\noutput: o\ndecoders: [{decoder: ar, "
        + ", ".join(many)
        + "}]": "span more than 1000",
        "date: 2001-99-99": "YAML",
        "a: !!timestamp x": "YAML",
        "a: !!int x": "YAML",
        "? [a]\n: 1": "YAML",
    }
    for text, words in texts.items():
        path.write_text(text)
        with memory_bound(128), pytest.raises(ValueError, match=rf"(?s)run\.yaml.*{words}"):
            load_config(path)


# ---- lines ------------------------------------------------------------------------------------------------
RESULT = {"filename": "0/samples/0.png", "tag": "colors", "prompt": "a", "correct": True, "reason": "", "metadata": "{}",
          "details": "{}"}  # fmt: skip
QUESTIONS = """item_id,text,proposition_id,dependency,category_broad,question_natural_language
0,a cat on a mat,1,0,entity,Is there a cat?
0,a cat on a mat,2,"0",entity,Is there a mat?
0,a cat on a mat,3,"1,2",relation,Is the cat on the mat?
"""


def jsonl(rows: list[Any]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def line_files(folder: Path) -> dict[str, tuple[Path, list[Any] | None, Callable[[Path], Any]]]:
    """name -> file, its rows (if they are JSON), reader."""
    judged = [dict(m) for m in clauses()]
    Image.fromarray(noise()).save(folder / "a.png")
    (folder / "0" / "samples").mkdir(parents=True)
    Image.fromarray(noise()).save(folder / "0" / "samples" / "00000.png")
    pairs = [{"image": "a.png", "prompt": "what?", "answer": "noise"}, {"prompt": "and?"}]
    done = [{"image": "a.png", "prompt": "what?", "text": "noise", "tokens": 2, "steps": 1}]
    found: dict[str, tuple[Path, list[Any] | None, Callable[[Path], Any]]] = {
        "prompts with clauses": (folder / "p.jsonl", judged, lambda p: load_prompts(str(p)).digest),
        "official prompts": (folder / "official.jsonl", judged, read_prompts),
        "results": (folder / "results.jsonl", [RESULT, {**RESULT, "correct": False}], lambda p: summarise(read_results(p))),
        "rows to train on": (folder / "rows.jsonl", pairs, read_rows),
        "captions": (folder / "captions.jsonl", done, _done),
        "plain prompts": (folder / "p.txt", None, lambda p: load_prompts(str(p))),
        "questions": (folder / "questions.csv", None, read_questions),
        "metadata": (folder / "0" / "metadata.jsonl", [judged[0]], lambda p: scan(folder)),
    }  # fmt: skip
    texts = {"plain prompts": "a red cat\nzwölf Bälle\n", "questions": QUESTIONS}
    for name, (path, rows, _) in found.items():
        path.write_bytes(jsonl(rows) if rows is not None else texts[name].encode())
    return found


NAMES = ["prompts with clauses", "official prompts", "results", "rows to train on", "captions", "plain prompts",
         "questions", "metadata"]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_damaged_lines(tmp_path: Path, name: str) -> None:
    found = line_files(tmp_path)
    assert sorted(found) == sorted(NAMES)
    path, rows, read = found[name]
    read(path)
    survive(lambda: read(path), path, damaged(path.read_bytes(), 2 * CASES, seed=17))
    if rows is not None:
        trees: Iterator[Any] = (tree for tree in bent(rows, 3 * CASES, seed=18) if isinstance(tree, list))
        survive(lambda: read(path), path, map(jsonl, trees), least=CASES // 10)


# ---- transformers folders ---------------------------------------------------------------------------------
def test_damaged_text_encoders(tmp_path: Path) -> None:
    """The T5 folder of a LlamaGen model: every file of it in turn."""
    folder = tmp_path / "text"
    make_text(folder)
    read = lambda: TextConditioner.from_pretrained(folder, 8)  # noqa: E731
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"):
        path = folder / name
        survive(read, path, damaged(path.read_bytes(), 12, seed=19), least=0)
        if path.suffix == ".json":
            survive(read, path, as_bytes(bent(json.loads(path.read_text()), 12, seed=20)), least=0)


def test_bent_model_cards(tmp_path: Path) -> None:
    """config.json of folders that claim to be transformers checkpoints, before any weight is read."""
    path = tmp_path / "config.json"
    cards = [
        {"model_type": "chameleon", "vocab_size": 100, "architectures": ["X"], "z_loss_weight": 1.0},
        {"model_type": "Emu3", "vocab_size": 300_000, "hidden_size": 64, "num_attention_heads": 4, "rope_scaling": None},
        {"model_type": "llava", "vision_config": {"hidden_size": 32}, "text_config": {"hidden_size": 32}},
    ]  # fmt: skip

    def read() -> None:
        load_hf(tmp_path)

    for seed, card in enumerate(cards):
        survive(read, path, as_bytes(bent(card, CASES // 3, seed=21 + seed)))
        survive(read, path, damaged(json.dumps(card).encode(), CASES // 4, seed=24))
    settings = tmp_path / "generation_config.json"
    path.write_text(json.dumps(cards[0]))
    survive(read, settings, as_bytes(bent({"visacc": {"family": "anole"}}, CASES // 2, seed=25)))
    for content in (b"", b"{", b"[]", b'{"model_type": "llava"}', b'{"model_type": []}'):
        path.write_bytes(content)
        assert not outcome(lambda: load_vlm(str(tmp_path)), path, f"load_vlm, {content!r}")


def test_write_json_is_read_back(tmp_path: Path) -> None:
    """The writers' own files are no case for the readers above to refuse."""
    write_json(tmp_path / "x.json", {"a": [1, None, "ä"]})
    assert json.loads((tmp_path / "x.json").read_text(encoding="utf-8")) == {"a": [1, None, "ä"]}
