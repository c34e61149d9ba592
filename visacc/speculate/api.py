"""``speculate(model, drafter)``: the same text as ``model.generate``, faster."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from visacc.models.vlm.target import VLMTarget
from visacc.speculate.checkpoints import load_drafter
from visacc.speculate.config import METHODS
from visacc.speculate.contract import TextDrafter, check_drafter, default_tree, named_drafter, plugin_names
from visacc.speculate.drafter import Drafter
from visacc.speculate.loop import Stop, generate
from visacc.speculate.ngram import NgramDrafter
from visacc.speculate.params import TextParams, from_generation_config
from visacc.speculate.stats import TextResult
from visacc.speculate.trees import TreePolicy, make_policy

_INPUTS = (
    "attention_mask",
    "pixel_values",
    "image_sizes",
    "image_grid_thw",
    "pixel_values_videos",
    "video_grid_thw",
    "second_per_grid_ts",
    "pixel_attention_mask",
    "token_type_ids",
    "mm_token_type_ids",
    "mm_encoder_outputs",
)
_PROCESSORS = (
    "RepetitionPenaltyLogitsProcessor",
    "MinLengthLogitsProcessor",
    "MinNewTokensLengthLogitsProcessor",
    "TemperatureLogitsWarper",
    "TopKLogitsWarper",
    "TopPLogitsWarper",
    "LogitNormalization",
)
_STOPS = ("MaxLengthCriteria", "EosTokenCriteria")


class Speculator:
    """A target with a drafter. Use it as ``custom_generate``, as a context manager, or call :meth:`generate`.

    Args:
        model: a transformers vision-language model of a supported family.
        drafter: an object with the members of :class:`visacc.speculate.contract.TextDrafter`, a folder, a name
            (see :func:`find_drafter`; ``"ngram"`` needs no training), or ``None`` (one token a step).
        method: for folders with official EAGLE, MSD or FLASH files, which cannot be told apart.
        tree: a policy, or options of :func:`make_policy`; default: what the drafter was made for.
        sampled_drafts: see :func:`visacc.speculate.loop.generate`.
    """

    def __init__(
        self,
        model: Any,
        drafter: TextDrafter | str | Path | None = "ngram",
        *,
        method: str | None = None,
        tree: TreePolicy | dict[str, Any] | None = None,
        sampled_drafts: bool = False,
    ) -> None:
        found = find_drafter(model, drafter, method)
        self.target = VLMTarget(
            model,
            tuple(found.taps) if found is not None else (),
            score=isinstance(found, Drafter) and found.config.prune < 1,
        )
        self.model, self.drafter = model, found
        if isinstance(found, Drafter):
            bind(found, self.target)
        self.policy = choose_policy(found, tree)
        self.sampled_drafts = sampled_drafts
        self.last: TextResult | None = None

    def run(self, inputs: dict[str, Any], params: TextParams, seeds: list[int], **options: Any) -> TextResult:
        """Generate with plain parameters; see :func:`visacc.speculate.loop.generate`."""
        options.setdefault("sampled_drafts", self.sampled_drafts)
        self.last = generate(self.target, self.drafter, self.policy, inputs, params, seeds, **options)
        return self.last

    def generate(self, *args: Any, streamer: Any = None, seed: int | None = None, **kwargs: Any) -> Any:
        """``model.generate`` with the same arguments, decoded speculatively.

        Args:
            streamer: as in transformers (one prompt only).
            seed: for sampling; default: drawn from torch's global generator.

        Raises:
            ValueError: options that are not reproduced, stop strings without ``tokenizer``.
        """
        plain = type(self.model).generate
        kwargs = self._stop_strings(args, kwargs)
        extra = {"text_streamer": streamer} if streamer is not None else {}
        if seed is not None:
            extra["seed"] = seed
        return plain(self.model, *args, custom_generate=self, **extra, **kwargs)

    def _stop_strings(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Turn stop strings into a stopping criterion: transformers loses the tokenizer on the way to callables."""
        config = kwargs.get("generation_config") or (args[1] if len(args) > 1 else None)
        config = config or self.model.generation_config
        kwargs = dict(kwargs)
        tokenizer, stops = kwargs.pop("tokenizer", None), kwargs.pop("stop_strings", None)
        stops = stops or getattr(config, "stop_strings", None)
        if not stops:
            return kwargs
        if tokenizer is None:
            raise ValueError("stop strings need the tokenizer: pass tokenizer=processor.tokenizer")
        from transformers import StoppingCriteriaList, StopStringCriteria

        rule = StopStringCriteria(tokenizer=tokenizer, stop_strings=stops)
        kwargs["stopping_criteria"] = StoppingCriteriaList([*(kwargs.get("stopping_criteria") or []), rule])
        if getattr(config, "stop_strings", None):
            if len(args) > 1:
                raise ValueError("pass a generation_config with stop strings by name")
            kwargs["generation_config"] = copy.deepcopy(config)
            kwargs["generation_config"].stop_strings = None
        return kwargs

    def __call__(
        self,
        model: Any,
        input_ids: Tensor,
        logits_processor: Any = None,
        stopping_criteria: Any = None,
        generation_config: Any = None,
        synced_gpus: bool = False,
        streamer: Any = None,
        text_streamer: Any = None,
        seed: int | None = None,
        **model_kwargs: Any,
    ) -> Any:
        """What transformers calls as ``custom_generate``."""
        if model is not self.model:
            raise ValueError(
                "this speculator was made for another model; make one with speculate(model, ...)"
            )
        for processor in logits_processor or ():
            name = type(processor).__name__
            # a tensor of ignored lengths is transformers' own way to skip the padding, as we do
            ignored = getattr(processor, "prompt_ignore_length", None)
            if name not in _PROCESSORS or (ignored is not None and not isinstance(ignored, Tensor)):
                raise ValueError(
                    f"logits processor {name} is not supported with speculative decoding; supported: "
                    + ", ".join(_PROCESSORS)
                )
        criteria = [c for c in stopping_criteria or () if type(c).__name__ not in _STOPS]
        params = from_generation_config(generation_config, input_ids.shape[1])
        inputs = {"input_ids": input_ids}
        inputs |= {k: model_kwargs[k] for k in _INPUTS if model_kwargs.get(k) is not None}
        positions = model_kwargs.get("position_ids")
        if positions is not None and positions.ndim == 3:
            inputs["position_ids"] = positions
        if seed is None:
            seed = 0 if params.greedy else int(torch.randint(2**62, ()))
        streamer = streamer or text_streamer
        if streamer is not None and input_ids.shape[0] > 1:
            raise ValueError("a streamer takes one prompt at a time")
        on_tokens = None
        if streamer is not None:
            streamer.put(input_ids.cpu())
            on_tokens = _feed(streamer)
        # rows of one call get their own streams, as images of one call do
        seeds = [seed + 0x51ED2701 * i for i in range(input_ids.shape[0])]
        result = self.run(
            inputs, params, seeds, stop=_stop(criteria) if criteria else None, on_tokens=on_tokens
        )
        if streamer is not None:
            streamer.end()
        sequences = torch.cat([input_ids, result.ids.to(input_ids.device)], dim=1)
        if getattr(generation_config, "return_dict_in_generate", False):
            from transformers.generation.utils import GenerateDecoderOnlyOutput

            return GenerateDecoderOnlyOutput(sequences=sequences)  # type: ignore[arg-type]
        return sequences

    def __enter__(self) -> Speculator:
        """Inside the block ``model.generate`` is this speculator's; the model itself is untouched."""
        if "generate" in vars(self.model):
            raise RuntimeError(
                "this model's generate is replaced already (a speculate block inside another?)"
            )
        self.model.generate = self.generate
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        del self.model.generate


def speculate(model: Any, drafter: TextDrafter | str | Path | None = "ngram", **options: Any) -> Speculator:
    """Speculative decoding for ``model``; see :class:`Speculator`."""
    return Speculator(model, drafter, **options)


def find_drafter(
    model: Any, drafter: TextDrafter | str | Path | None, method: str | None
) -> TextDrafter | None:
    """Resolve what the caller gave.

    An object, ``"ngram"``, a folder, the method of an embedded drafter, or a name that an installed package
    registered in the entry-point group ``visacc.speculators`` (a function of the model).

    Raises:
        ValueError: an object that is no drafter (says which members are missing), a name that nothing has.
        RuntimeError: a plug-in failed to make its drafter.
    """
    if drafter is None:
        return None
    if not isinstance(drafter, (str, Path)):
        return check_drafter(drafter, "the speculator")
    if drafter == "ngram":
        return NgramDrafter(int(model.get_output_embeddings().weight.shape[0]))
    if isinstance(drafter, str) and drafter in METHODS and not Path(drafter).is_dir():
        folder = embedded_folder(model, drafter)
        if folder is None:
            raise ValueError(
                f"no trained {drafter!r} drafter comes with this model; pass the folder of one, or 'ngram', which"
                " needs no training"
            )
        drafter = folder
    if isinstance(drafter, str) and not Path(drafter).is_dir():
        made = named_drafter(drafter, model)
        if made is not None:
            return made
        if not Path(drafter).exists():
            known = sorted({"ngram", *METHODS, *plugin_names()})
            raise ValueError(
                f"folder {drafter!r} does not exist, nor is that the name of a speculator (names: {', '.join(known)})"
            )
    return load_drafter(drafter, method)


def embedded_folder(model: Any, method: str) -> Path | None:
    """Folder of a drafter shipped beside the model's own files, if there is one."""
    origin = getattr(model.config, "_name_or_path", "") or ""
    folder = Path(origin) / "drafters" / method if origin else None
    return folder if folder is not None and (folder / "config.json").exists() else None


def bind(drafter: Drafter, target: VLMTarget) -> None:
    """Check that a drafter fits a target and connect them (device and dtype of the target).

    Raises:
        ValueError: it was made for another target.
    """
    known, actual = drafter.config.target, target.describe()
    wrong = [
        f"{k}: {v!r} (target: {actual[k]!r})" for k, v in known.items() if k in actual and actual[k] != v
    ]
    if wrong:
        raise ValueError(
            f"this {drafter.config.method} drafter was trained for another target: {', '.join(wrong)}"
        )
    drafter.bind(target.embed, target.logits, hidden_size=target.hidden_size, vocab_size=target.vocab_size)
    drafter.to(device=target.device, dtype=target.head.weight.dtype).eval()  # type: ignore[call-overload,arg-type]


def choose_policy(drafter: TextDrafter | None, tree: TreePolicy | dict[str, Any] | None) -> TreePolicy | None:
    """The tree a drafter grows: the caller's, the drafter's own, or a default.

    Raises:
        ValueError: the tree needs another number of tokens per drafter row.
    """
    if drafter is None:
        if tree is not None:
            raise ValueError("a tree needs a drafter")
        return None
    if isinstance(tree, dict):
        policy: TreePolicy = make_policy(**tree)
    elif tree is not None:
        policy = tree
    else:
        policy = default_tree(drafter)
    if policy.ahead != drafter.ahead:
        raise ValueError(
            f"this drafter predicts {drafter.ahead} token(s) per row but the tree is for {policy.ahead};"
            " drafters with several heads need a block tree"
        )
    return policy


def _stop(criteria: list[Any]) -> Stop:
    def stop(ids: Tensor, generated: int) -> bool:
        return any(bool(torch.as_tensor(criterion(ids, None)).all()) for criterion in criteria)

    return stop


def _feed(streamer: Any) -> Callable[[Tensor, Tensor], None]:
    def feed(rows: Tensor, tokens: Tensor) -> None:
        ids = tokens[0][tokens[0] >= 0] if tokens.numel() else tokens.flatten()
        if ids.numel():
            streamer.put(ids.cpu())

    return feed
