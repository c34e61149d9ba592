"""``model.generate(..., custom_generate=visacc.decoders.MCSJD(window=32))`` for Emu3, Chameleon and their kin.

transformers prepares everything (ids, masks, processors, limits) and calls the decoder object, which runs the engine
and returns ids. The law is that of ``generate`` without it: guidance, the prefix constraint, temperature, top-k and
top-p are read from the prepared processors.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from visacc.engine import decode
from visacc.integrations.constraint import Requests, check_constraint, probe_layout, read_processors
from visacc.models.base import Conditioning
from visacc.models.hf.loading import wrap
from visacc.models.hf.shared_vocab import SharedVocabularyModel
from visacc.sampling import SamplingParams

if TYPE_CHECKING:
    from visacc.decoders.base import Decoder

_STOPPING = ("MaxLengthCriteria", "EosTokenCriteria")


def run(
    decoder: Decoder,
    model: Any,
    input_ids: Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    *,
    grid: tuple[int, int] | None = None,
    seed: int | list[int] | None = None,
    callback: Callable[..., Any] | None = None,
    **model_kwargs: Any,
) -> Any:
    """What :class:`visacc.decoders.Decoder` objects do when ``generate`` calls them.

    Args:
        grid: (rows, columns) of the picture, where no ``prefix_allowed_tokens_fn`` tells.
        seed: one seed, or one per row; by default drawn from torch's global generator, as ``generate`` samples.
        callback: see :func:`visacc.engine.decode`.

    Returns:
        ids int64 [B, P + N], or transformers' output object where ``return_dict_in_generate`` is set.
    """
    adapter = _adapter(model, grid)
    requests = read_processors(logits_processor, set(adapter.code_ids.tolist()))
    _check_stopping(stopping_criteria)
    sampling = _sampling(model, generation_config, requests)
    batch, prompt = input_ids.shape
    room = generation_config.max_length - prompt
    end_ids = _ids(generation_config.eos_token_id)
    if requests.allowed is not None:
        layout = probe_layout(requests.allowed, input_ids, adapter.code_ids, end_ids, room, grid)
        adapter = adapter.with_layout(layout)
    elif grid is None:
        raise ValueError(
            "which picture? pass grid=(rows, columns) to generate(), or a prefix_allowed_tokens_fn that says"
            " where row ends belong"
        )
    if adapter.layout.total > room:
        raise ValueError(
            f"the picture takes {adapter.layout.total} tokens, but max_new_tokens leaves {room}; set it to"
            f" {adapter.layout.total}"
        )
    cond = _conditioning(input_ids, model_kwargs.get("attention_mask"), requests)
    seeds = _seeds(seed, batch)
    result = decode(adapter, decoder, cond, sampling, seeds, callback=callback)
    tokens = adapter.sequence_ids(result.sequence).to(input_ids.device)
    if requests.allowed is not None:
        check_constraint(requests.allowed, input_ids, tokens, adapter.layout)
    sequences = torch.cat([input_ids, tokens], dim=1)
    if generation_config.return_dict_in_generate:
        from transformers.generation import GenerateDecoderOnlyOutput

        return GenerateDecoderOnlyOutput(sequences=sequences)  # type: ignore[arg-type]
    return sequences


def _adapter(model: Any, grid: tuple[int, int] | None) -> SharedVocabularyModel:
    adapter = wrap(model, grid=grid) if grid is not None else wrap(model)
    if not isinstance(adapter, SharedVocabularyModel):
        raise ValueError(
            f"{type(model).__name__} draws through its own loop, not through generate(); use"
            " 'with visacc.attach(model, decoder=...) as run: run.generate_codes(prompts)'"
        )
    return adapter


def _check_stopping(criteria: Any) -> None:
    for one in criteria or ():
        if type(one).__name__ not in _STOPPING:
            raise ValueError(
                f"stopping criterion {type(one).__name__} cannot be used with a parallel decoder: a picture has a"
                " known length; use callback= to stop early"
            )


def _sampling(model: Any, config: Any, requests: Requests) -> SamplingParams:
    if (config.num_beams or 1) != 1:
        raise ValueError("parallel decoding has no beams; use num_beams=1")
    if not config.do_sample:
        scale = requests.sampling.get("guidance_scale", 1.0)
        return SamplingParams(guidance_scale=scale, temperature=0)
    if requests.sampling.get("top_k") == 50 and model.generation_config.top_k is None:
        warnings.warn(
            "top_k=50 is the default that transformers' generate() fills in; image models are usually sampled with"
            " top_k=0 (off) or thousands. Pass top_k explicitly",
            stacklevel=2,
        )
    return SamplingParams(**requests.sampling)


def _conditioning(ids: Tensor, mask: Tensor | None, requests: Requests) -> Conditioning:
    batch = ids.shape[0]
    data = {"ids": ids, "mask": torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()}
    guided = "guidance_scale" in requests.sampling
    if guided:
        free = ids[:, -1:] if requests.uncond_ids is None else requests.uncond_ids.to(ids.device)
        free_mask = requests.uncond_mask
        seen = (
            torch.ones_like(free, dtype=torch.bool) if free_mask is None else free_mask.to(ids.device).bool()
        )
        data |= {"uncond_ids": free.expand(batch, -1), "uncond_mask": seen.expand(batch, -1)}
    return Conditioning(batch, data, has_uncond=guided)


def _ids(value: Any) -> set[int]:
    if value is None:
        return set()
    if isinstance(value, Tensor):
        value = value.flatten().tolist()
    return set(value) if isinstance(value, (list, tuple)) else {int(value)}


def _seeds(seed: int | list[int] | None, batch: int) -> list[int]:
    if seed is None:
        return torch.randint(1 << 62, (batch,)).tolist()
    from visacc.pipeline import image_seeds

    return image_seeds(seed, None, batch)
