"""Drafters of other packages: any object with the documented members, given directly and by an installed entry point."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image
from test_pipeline import FakeEntry
from torch import Tensor
from vlm_tiny import save_untrained_captioner

from visacc import registry
from visacc.cli import main
from visacc.models.vlm.scenes import draw_scene, picture
from visacc.speculate import bench as bench_module
from visacc.speculate.api import Speculator, choose_policy
from visacc.speculate.block_tree import BlockTree
from visacc.speculate.pipeline import CaptionPipeline
from visacc.speculate.trees import Chain, DynamicTree, StaticTree

PAGE = Path(__file__).parent.parent / "docs" / "extending" / "drafter.md"
CALL: dict[str, Any] = {"prompts": "describe the image .", "max_new_tokens": 10}


def language(kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.M | re.S)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save_untrained_captioner(path / "model")
    (path / "pictures").mkdir()
    for i in range(2):
        Image.fromarray(picture(draw_scene(i))).save(path / "pictures" / f"{i}.png")
    return path


@pytest.fixture(scope="module")
def plain(folder: Path) -> CaptionPipeline:
    return CaptionPipeline(str(folder / "model"), speculator=None, device="cpu")


def pictures(folder: Path) -> list[Path]:
    return sorted((folder / "pictures").iterdir())


class Bare:
    """The documented members and nothing else. Drafts what it saw following a token in ``texts`` of the target."""

    taps: tuple[int, ...] = ()
    ahead = 1

    def __init__(self, vocab: int, texts: list[list[int]]) -> None:
        self.follows = torch.zeros(vocab, dtype=torch.int64)
        for text in texts:
            self.follows[torch.tensor(text[:-1])] = torch.tensor(text[1:])

    def law(self, tokens: Tensor) -> Tensor:
        law = torch.zeros(*tokens.shape, len(self.follows))
        return law.scatter(-1, self.follows[tokens][..., None], 8.0)

    def prefill(self, view: Any, feats: Any, root: Tensor, *, room: int) -> Any:
        assert view.input_ids.shape == feats.last.shape[:2]
        assert room > 0
        state = SimpleNamespace(feature=root[:, None], logits=self.law(root))

        def select(rows: Tensor) -> None:
            state.feature, state.logits = state.feature[rows], state.logits[rows]

        state.select = select
        return state

    def session(self, state: Any) -> Any:
        return SimpleNamespace(run=lambda tokens, *_: (tokens[..., None], self.law(tokens)))

    def observe(self, state: Any, step: Any) -> None:
        state.feature, state.logits = step.next_root[:, None], self.law(step.next_root)


def written(plain: CaptionPipeline, folder: Path) -> list[list[int]]:
    """What the target answers, as ids."""
    done = plain(pictures(folder), **CALL)
    return [plain.tokenizer.encode(str(c.text), add_special_tokens=False) for c in done]


def bare(plain: CaptionPipeline, folder: Path) -> Bare:
    return Bare(plain.model.config.text_config.vocab_size, written(plain, folder))


@pytest.mark.parametrize(
    "tree", [None, Chain(3), DynamicTree(depth=2, top_k=2, budget=5), StaticTree()], ids=str
)
def test_an_object_that_extends_nothing(plain: CaptionPipeline, folder: Path, tree: Any) -> None:
    """Greedy and sampled text of plain decoding, in fewer steps; rows leave the batch at different times."""
    fast = CaptionPipeline(plain.model, plain.processor, speculator=bare(plain, folder), tree=tree)
    rows = [*pictures(folder), None]
    steps = [0, 0]
    for options in ({}, {"temperature": 1.0, "seed": 4}):
        one, two = (p(rows, **CALL, **options) for p in (plain, fast))
        assert [c.text for c in two] == [c.text for c in one]
        assert [c.error for c in two] == [None] * 3
        steps = [steps[0] + sum(c.steps for c in one), steps[1] + sum(c.steps for c in two)]
    assert steps[1] < steps[0]


def test_members_that_may_be_left_out(plain: CaptionPipeline, folder: Path) -> None:
    made = bare(plain, folder)
    assert choose_policy(made, None) == DynamicTree(depth=4, top_k=4, budget=24)
    made.ahead = 3
    assert choose_policy(made, None) == BlockTree(3)
    made.ahead = 1

    class Full(Bare):
        texts: list[Tensor] = []  # noqa: RUF012

        def default_tree(self) -> Chain:
            return Chain(2)

        def remember(self, text: Tensor) -> None:
            self.texts.append(text)

        def forget(self) -> None:
            self.texts.clear()

    full = Full(len(made.follows), written(plain, folder))
    speculator = Speculator(plain.model, full)
    assert speculator.policy == Chain(2)
    done = CaptionPipeline(plain.model, plain.processor, speculator=full)(pictures(folder), **CALL)
    assert [len(t) for t in full.texts] == [c.tokens for c in done]
    bench_module._forget(speculator)()
    assert not full.texts
    bench_module._forget(Speculator(plain.model, made))()


def test_what_is_no_drafter_is_refused(plain: CaptionPipeline, folder: Path) -> None:
    half = SimpleNamespace(taps=(), prefill=print, session=print)
    for given, match in (
        (half, "the speculator is no drafter: an object of SimpleNamespace has no ahead, observe"),
        (7, "an object of int has no taps, ahead, prefill, session, observe"),
        (Bare, "the class Bare, not a drafter: pass an object of it"),
        (
            SimpleNamespace(taps=(), ahead=1, prefill=1, session=print, observe=2),
            "prefill, observe of .* called",
        ),
        (SimpleNamespace(taps=(), ahead=0, prefill=print, session=print, observe=print), "at least 1, got 0"),
        (
            "nowhere",
            r"folder 'nowhere' does not exist, nor is that the name of a speculator \(names: .*ngram",
        ),
    ):
        for make in (
            lambda given=given: Speculator(plain.model, given),
            lambda given=given: CaptionPipeline(plain.model, plain.processor, speculator=given),
        ):
            with pytest.raises(ValueError, match=match):
                make()


def test_broken_plugins(plain: CaptionPipeline, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(model: Any) -> Any:
        raise OSError("no phrases here")

    plugins = (
        FakeEntry("bad", ImportError("no such module")),
        FakeEntry("half", lambda model: object()),
        FakeEntry("fails", fails),
        FakeEntry("none", lambda model: None),
        FakeEntry("text", "not a function"),
        FakeEntry("good", lambda model: bare(plain, folder)),
    )
    monkeypatch.setattr(registry, "_plugins", lambda group: plugins if group == "visacc.speculators" else ())
    assert isinstance(Speculator(plain.model, "good").drafter, Bare)
    with (
        pytest.warns(UserWarning, match="plug-in 'bad' of other cannot be loaded: no such module"),
        pytest.raises(ValueError, match="folder 'bad' does not exist, nor"),
    ):
        Speculator(plain.model, "bad")
    for name, kind, match in (
        ("half", ValueError, "what plug-in 'half' of other made is no drafter: .*object has no taps"),
        ("none", ValueError, "NoneType has no taps"),
        ("text", ValueError, "must be a function of the model"),
        ("fails", RuntimeError, "plug-in 'fails' of other made no drafter: OSError: no phrases here"),
    ):
        with pytest.raises(kind, match=match):
            Speculator(plain.model, name)


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The page's package, installed: its code as my_package, its entry points in a dist-info folder."""
    (tmp_path / "my_package.py").write_text("\n".join(language("python")), encoding="utf-8")
    info = tmp_path / "my_package-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-package\nVersion: 1\n")
    (table,) = language("toml")
    points = table.replace('[project.entry-points."visacc.speculators"]', "[visacc.speculators]")
    (info / "entry_points.txt").write_text(points.replace('"', ""))
    monkeypatch.syspath_prepend(tmp_path)
    registry._plugins.cache_clear()
    yield
    registry._plugins.cache_clear()


@pytest.mark.usefixtures("installed")
def test_the_pages_drafter_by_name(
    plain: CaptionPipeline, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """... through the pipeline, ``visacc caption`` and ``visacc bench vlm``."""
    texts = [c.text for c in plain(pictures(folder), **CALL)]
    fast = CaptionPipeline(plain.model, plain.processor, speculator="phrases")
    assert type(fast.speculator.drafter).__name__ == "PhraseBook"
    assert [c.text for c in fast(pictures(folder), **CALL)] == texts
    model, out = ["-m", str(folder / "model"), "--device", "cpu"], tmp_path / "out.jsonl"
    line = ["caption", *map(str, pictures(folder)), *model, "-s", "phrases", "-o", str(out)]
    with pytest.raises(SystemExit) as stop:
        main([*line, "--prompt", CALL["prompts"], "--max-new-tokens", "10"])
    assert stop.value.code == 0
    assert [json.loads(row)["text"] for row in out.read_text().splitlines()] == texts
    line = ["bench", "vlm", *model, "--images", str(folder / "pictures"), "-o", str(tmp_path / "bench.json")]
    line += ["--methods", "phrases", "--count", "1", "--repeats", "1", "--max-new-tokens", "6"]
    with pytest.raises(SystemExit) as stop:
        main([*line, "--prompt", CALL["prompts"]])
    assert stop.value.code == 0
    rows = json.loads((tmp_path / "bench.json").read_text())["rows"]
    mine = [row for row in rows if row["method"] == "phrases"]
    assert mine
    assert all("failed" not in row and row["tokens"] > 0 for row in mine)
