"""Training an EAGLE-type drafter for an image model: ``visacc train drafter``.

The target samples its own training data (:mod:`visacc.train.harvest`), stays frozen, and lends the drafter its head.
Runs are resumable from ``OUT/state.pt`` and log one JSON line at a time to ``OUT/log.jsonl``; with several processes
(``accelerate launch`` or ``torchrun``) every process harvests its own samples and the gradients are averaged.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from visacc.decoders.eagle import Eagle
from visacc.drafters.bind import target_card
from visacc.drafters.checkpoint import load_drafter, save_drafter
from visacc.drafters.config import DrafterConfig
from visacc.drafters.network import EagleNetwork
from visacc.engine import decode
from visacc.models.base import ImageModel
from visacc.models.llamagen import LlamaGen
from visacc.sampling import SamplingParams
from visacc.train.harvest import Harvest
from visacc.train.loss import LossSpec, draft_loss
from visacc.train.processes import make_accelerator, shards
from visacc.train.shards import load_optimizer, optimizer_state, shard, whole_state
from visacc.weights import read_weights
from visacc.writing import write_torch


@dataclass(frozen=True)
class DrafterTraining:
    """Settings of a run; optimiser and loss defaults are the published ones.

    Attributes:
        steps: optimiser steps; batch: samples per process and accumulation round; accumulate: rounds per step.
        lr, betas, weight_decay, clip: AdamW, gradient values clipped at ``clip``.
        warmup: fraction of the steps with rising rate; the rate falls linearly to zero afterwards.
        loss: see :class:`LossSpec`.
        pool, reuse: see :class:`Harvest`.
        precision: "fp32" or "bf16" (autocast of the drafter).
        padding: what padded prompt slots see in the features, see
            :func:`visacc.models.llamagen.gpt.padded_prefix_mask`.
        train_embedding: train the drafter's embedding as well (the published programs freeze it).
        intermediate_size: width of the MLP, 0 takes the target's.
        tree: tree that the drafter will be used with by default, and evaluated with.
        eval_every, eval_prompts: steps between two measurements of accepted length, and how many held-out prompts.
        save_every: steps between two checkpoints.
        shard: spread parameters, gradients and optimiser states over the processes (FSDP2); also on where accelerate is
            configured for FSDP.
    """

    steps: int = 2000
    batch: int = 4
    accumulate: int = 1
    lr: float = 1e-4
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.01
    clip: float = 0.5
    warmup: float = 0.03
    loss: LossSpec = field(default_factory=LossSpec)
    pool: int = 512
    reuse: int = 4
    precision: str = "fp32"
    padding: str = "self"
    train_embedding: bool = False
    intermediate_size: int = 0
    tree: str = "2x5"
    eval_every: int = 250
    eval_prompts: int = 8
    save_every: int = 250
    log_every: int = 20
    seed: int = 0
    shard: bool = False

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "accumulate", "eval_every", "eval_prompts", "save_every", "log_every"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a positive integer, got {value!r}")
        if self.precision not in ("fp32", "bf16"):
            raise ValueError(f"precision must be fp32 or bf16, got {self.precision!r}")
        if not (self.lr > 0 and 0 <= self.warmup < 1):
            raise ValueError(f"lr must be positive and warmup lie in [0, 1), got {self.lr} and {self.warmup}")


def new_drafter(model: ImageModel, settings: DrafterTraining) -> EagleNetwork:
    """A fresh drafter for a LlamaGen-type model; its embedding starts as a copy of the target's.

    Raises:
        ValueError: the model is of another kind, or gives no features.
    """
    if not isinstance(model, LlamaGen):
        raise ValueError(
            f"drafters can be trained for LlamaGen-type models; {model.name} is a {type(model).__name__}"
        )
    cfg = model.gpt.config
    facts: dict[str, Any] = {}
    if cfg.model_type == "t2i":
        facts["padding"] = settings.padding
    config = DrafterConfig(
        family="llamagen",
        hidden_size=cfg.dim,
        intermediate_size=settings.intermediate_size or cfg.ffn_dim,
        num_heads=cfg.n_head,
        vocab_size=cfg.vocab_size,
        eps=1e-6,
        rope_theta=cfg.rope_base,
        prefix=cfg.prefix_len,
        grid=cfg.grid,
        tree=settings.tree,
        target=target_card(model, cfg.dim, **facts),
    )
    torch.manual_seed(settings.seed)
    network = EagleNetwork(config)
    for module in network.modules():
        if isinstance(module, torch.nn.Linear):
            torch.nn.init.normal_(module.weight, std=cfg.dim**-0.5)
            if module.bias is not None:
                torch.nn.init.zeros_(module.bias)
    with torch.no_grad():
        network.embed_tokens.weight.copy_(model.gpt.tok_embeddings.weight)
        # the first guess for the next feature is the present one
        network.fc.weight[:, config.hidden_size :].copy_(torch.eye(config.hidden_size))
        for name, weight in network.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weight.mul_(0.1)
    return network


def optimizer(network: EagleNetwork, settings: DrafterTraining) -> torch.optim.AdamW:
    network.embed_tokens.weight.requires_grad_(settings.train_embedding)
    trained = [p for p in network.parameters() if p.requires_grad]
    return torch.optim.AdamW(trained, settings.lr, betas=settings.betas, weight_decay=settings.weight_decay)


def rate(step: int, settings: DrafterTraining) -> float:
    """Learning-rate factor of optimiser step ``step``: linear rise, linear fall to zero."""
    rising = max(1, round(settings.warmup * settings.steps))
    if step < rising:
        return (step + 1) / rising
    return max(0.0, (settings.steps - step) / max(1, settings.steps - rising))


@torch.no_grad()
def accepted_length(
    model: ImageModel,
    network: EagleNetwork,
    prompts: Sequence[Any],
    sampling: SamplingParams,
    *,
    tree: str,
    seed: int = 0,
) -> dict[str, float]:
    """Committed tokens per step of exact decoding with the drafter, and the steps per image."""
    was_training = network.training
    network.eval()
    decoder = Eagle(network, tree)
    result = decode(model, decoder, model.encode(prompts), sampling, [seed + i for i in range(len(prompts))])
    network.train(was_training)
    return {"tau": result.stats.tau, "steps_per_image": result.stats.nfe}


class Log:
    """JSON lines, appended to a file and handed to ``echo``."""

    def __init__(self, path: Path, echo: Any = print) -> None:
        self.path, self.echo = path, echo

    def write(self, **record: Any) -> None:
        line = json.dumps({k: round(v, 5) if isinstance(v, float) else v for k, v in record.items()})
        with self.path.open("a") as file:
            file.write(line + "\n")
        self.echo(line)


def train_drafter(
    model: ImageModel,
    prompts: Sequence[Any],
    held_out: Sequence[Any],
    out: str | Path,
    settings: DrafterTraining | None = None,
    sampling: SamplingParams | None = None,
    *,
    init: str | Path | None = None,
    echo: Any = print,
) -> EagleNetwork:
    """Train, or resume, in the folder ``out``; the finished drafter is written to ``out/drafter``.

    Args:
        held_out: prompts for the accepted length, not trained on.
        sampling: how the target samples; ``None`` takes the model's own defaults.
        init: folder of a drafter to start from (of an earlier version of the target, say).

    Raises:
        ValueError: bad settings, no prompts, a held-out prompt among the training prompts, or a folder with a run of
            other settings.
        RuntimeError: accelerate is not installed or configured for something else, or one process is to be sharded.
    """
    settings = settings or DrafterTraining()
    sampling = sampling or SamplingParams.merge(model.defaults, {})
    if not prompts or not held_out:
        raise ValueError("training needs training prompts and held-out prompts")
    shared = set(map(str, prompts)) & set(map(str, held_out))
    if shared:
        raise ValueError(
            f"{len(shared)} prompts are both trained on and held out, e.g. {sorted(shared)[0]!r}"
        )
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    accelerator = make_accelerator(model.device, settings.accumulate)
    network = new_drafter(model, settings)
    if init is not None:
        _start_from(network, init)
    network.to(model.device)
    state, start = _resume(out / "state.pt", network, settings, model)
    sharded = shards(accelerator, settings.shard)
    if sharded:
        shard(network, model.device)
    optim: Any = optimizer(network, settings)
    if state is not None:
        load_optimizer(optim, state)
    prepared: Any = network
    if not sharded:
        prepared, optim = accelerator.prepare(network, optim)
    inner: EagleNetwork = accelerator.unwrap_model(prepared)
    harvest = Harvest(
        model,
        prompts,
        sampling,
        settings.batch,
        settings.pool,
        settings.reuse,
        settings.seed,
        settings.padding if isinstance(model, LlamaGen) and model.gpt.config.model_type == "t2i" else "",
        folder=out,
    )
    stream = harvest.batches(
        start * settings.accumulate, accelerator.process_index, accelerator.num_processes
    )
    log = Log(out / "log.jsonl", echo if accelerator.is_main_process else lambda line: None)
    seen: list[dict[str, Tensor]] = []
    began = time.perf_counter()
    for step in range(start, settings.steps):
        for group in optim.param_groups:
            group["lr"] = settings.lr * rate(step, settings)
        torch.manual_seed(
            settings.seed * 1_000_003 + step * accelerator.num_processes + accelerator.process_index
        )
        prepared.train()
        for _ in range(settings.accumulate):
            data = next(stream)
            with accelerator.accumulate(prepared):
                with torch.autocast(model.device.type, torch.bfloat16, enabled=settings.precision == "bf16"):
                    loss, parts = draft_loss(prepared, model.head, data, settings.loss)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    torch.nn.utils.clip_grad_value_(prepared.parameters(), settings.clip)
                    optim.step()
                    optim.zero_grad(set_to_none=True)
            seen.append({"loss": loss.detach(), **parts})
        done = step + 1
        measures, saves = (
            done % every == 0 or done == settings.steps
            for every in (settings.eval_every, settings.save_every)
        )
        # every process helps to put the shards together
        current = _whole(inner) if sharded and (measures or saves) else inner
        state = optimizer_state(optim) if saves else None
        if not accelerator.is_main_process:
            continue
        if done % settings.log_every == 0 or done == settings.steps:
            means = {k: float(torch.stack([s[k] for s in seen]).mean()) for k in seen[0]}
            log.write(step=done, seconds=time.perf_counter() - began, lr=optim.param_groups[0]["lr"], **means)
            seen, began = [], time.perf_counter()
        if measures:
            chosen = list(held_out)[: settings.eval_prompts]
            log.write(step=done, **accepted_length(model, current, chosen, sampling, tree=settings.tree))
        if state is not None:
            _save(out / "state.pt", current, state, done, settings, model)
    finished = _whole(inner) if sharded else inner
    if accelerator.is_main_process:
        save_drafter(finished, out / "drafter")
    accelerator.wait_for_everyone()  # the drafter is there when any process goes on
    return finished.eval().requires_grad_(False)


def _whole(network: EagleNetwork) -> EagleNetwork:
    """A copy of a sharded drafter in one piece; all processes must ask together."""
    copy = EagleNetwork(network.config)
    copy.load_state_dict(whole_state(network.state_dict()))
    return copy.to(next(network.parameters()).device)


def _start_from(network: EagleNetwork, folder: str | Path) -> None:
    """Take the weights of another drafter of the same shape."""
    other = load_drafter(folder)
    for name in ("hidden_size", "intermediate_size", "num_heads", "vocab_size", "prefix", "grid"):
        ours, theirs = getattr(network.config, name), getattr(other.config, name)
        if ours != theirs:
            raise ValueError(f"{folder} cannot be the start: its {name} is {theirs}, this drafter's {ours}")
    network.load_state_dict(other.state_dict())


def _facts(settings: DrafterTraining, model: ImageModel) -> str:
    """What must not change between a run and its continuation (the number of steps may)."""
    free = {"steps", "eval_every", "eval_prompts", "save_every", "log_every", "shard"}
    kept = {k: v for k, v in asdict(replace(settings)).items() if k not in free}
    return json.dumps({"target": model.fingerprint(), **kept}, sort_keys=True)


def _save(
    path: Path,
    network: EagleNetwork,
    optimizer: dict[str, Any],
    step: int,
    settings: DrafterTraining,
    model: ImageModel,
) -> None:
    state = {
        "network": network.state_dict(),
        "optimizer": optimizer,
        "step": step,
        "facts": _facts(settings, model),
    }
    write_torch(path, state)


def _resume(
    path: Path, network: EagleNetwork, settings: DrafterTraining, model: ImageModel
) -> tuple[dict[str, Any] | None, int]:
    """Load the network; the state of the optimiser and the step where the run goes on."""
    if not path.is_file():
        return None, 0
    state, _ = read_weights(path)
    if state.get("facts") != _facts(settings, model):
        raise ValueError(
            f"{path} belongs to a run with other settings or another target; choose another folder or remove it"
        )
    network.load_state_dict(state["network"])
    return state["optimizer"], int(state["step"])
