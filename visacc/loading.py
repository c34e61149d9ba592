"""Finding and loading a model by name, folder, file or hub id."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from visacc.decoders.base import Decoder
from visacc.models.base import ImageModel
from visacc.pipeline import TextToImagePipeline
from visacc.reading import read_object
from visacc.registry import make_decoder, model_plugins, unknown

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load(
    name_or_path: str | Path = "shapes-t2i",
    decoder: str | Decoder = "ar",
    *,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    image_size: int | str | tuple[int, int] | None = None,
    model_options: dict[str, Any] | None = None,
    compile: bool = False,
    device_map: Any = None,
    shard: bool = False,
    **decoder_options: Any,
) -> TextToImagePipeline:
    """Load a model and return a pipeline with the given decoder.

    Args:
        name_or_path: a name that ``visacc list models`` shows, a folder or file with a checkpoint, or a Hugging Face hub
            id.
        decoder: name or object; its options follow as keyword arguments (``window=32``).
        device: default is the first GPU, else the CPU.
        dtype: default float32 on a CPU and bfloat16 on a GPU.
        image_size: pixels, for models of several sizes: 512, or "768x512" and (768, 512) (height x width) where the family
            draws other shapes than squares.
        model_options: passed to the family's own loader, e.g. ``{"vq": file}`` for LlamaGen.
        compile: compile the model's forward, see :class:`TextToImagePipeline`.
        device_map: for models of the transformers library that one GPU does not hold: "auto" lets accelerate spread the
            layers over the GPUs of this process (and the CPU), which work one after the other. ``device`` is then not
            looked at.
        shard: for a model that one GPU does not hold, in a program that accelerate or torchrun started as several
            processes: each keeps a part of every layer (FSDP2) and decodes images of its own. When a process has no more
            images to make it must call :meth:`TextToImagePipeline.finish`, as the others wait for it until then.

    Raises:
        ValueError: unknown names, files that do not fit the request, bad options. Says what would be right.
        RuntimeError: ``shard`` in a process that is alone.
    """
    options = dict(model_options or {})
    own = sorted(options.keys() & inspect.signature(load).parameters.keys() - {"device_map"})
    if own:
        raise ValueError(f"{', '.join(own)}: no option of a model's loader but an argument of its own")
    if device_map is not None:
        options["device_map"] = device_map
    # a mistake in the decoder's name or options should not cost the time that weights take
    make_decoder(decoder, **{k: v for k, v in decoder_options.items() if (k, v) != ("window", "auto")})
    if shard and compile:
        raise ValueError("a sharded model cannot be compiled: load it with shard or with compile")
    model = load_model(
        name_or_path, device=device, dtype=dtype, image_size=image_size, shard=shard, **options
    )
    return TextToImagePipeline(model, decoder, compile=compile, **decoder_options)


def load_model(
    name_or_path: str | Path,
    *,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    image_size: int | str | tuple[int, int] | None = None,
    shard: bool = False,
    **options: Any,
) -> ImageModel:
    """The adapter alone; see :func:`load`."""
    if shard:
        return _load_shards(name_or_path, device=device, dtype=dtype, image_size=image_size, **options)
    where = as_device(device)
    size = _pixels(image_size)
    common: dict[str, Any] = {"device": where, "dtype": as_dtype(dtype, where), "image_size": size}
    try:
        return _load(str(name_or_path), common, options)
    except TypeError as error:
        if not options or "unexpected keyword argument" not in str(error):
            raise
        if "device_map" in options:
            raise ValueError(
                f"device_map spreads models of the transformers library; {name_or_path} is none: for a model that one GPU"
                " does not hold start several processes and load it with shard=True"
            ) from error
        raise ValueError(
            f"{name_or_path} does not know one of the model options {sorted(options)}: {error}"
        ) from error


def _load_shards(name_or_path: str | Path, *, device: Any, dtype: Any, **options: Any) -> ImageModel:
    """Load on the CPU and hand the layers to the processes one by one."""
    from visacc.eval.world import join, several
    from visacc.sharding import Shards

    if not several():
        raise RuntimeError(
            "shard=True spreads the model over several processes and this one is alone: start the program with accelerate"
            " launch or torchrun"
        )
    where = join(None if device is None else str(device)).device
    model = load_model(name_or_path, device="cpu", dtype=as_dtype(dtype, where), **options)
    model.shards = Shards(model, where)
    return model


def _load(name: str, common: dict[str, Any], options: dict[str, Any]) -> ImageModel:
    from visacc.models import llamagen
    from visacc.models.lpd import loading as lpd
    from visacc.models.shapes import EMBEDDED

    own: list[tuple[bool, Callable[..., ImageModel]]] = [
        (name in EMBEDDED, lambda **kwargs: EMBEDDED[name](**kwargs)),
        (name in lpd.NAMES or lpd.is_lpd(Path(name)), partial(lpd.load, name)),
        (name in llamagen.RELEASED or _is_llamagen(Path(name)), partial(llamagen.load, name)),
    ]
    for fits, loader in own:
        if fits:
            return loader(**{**common, "image_size": _side(common["image_size"], name)}, **options)
    plugins = model_plugins()
    if name in plugins:
        return plugins[name](name, **common, **options)
    elsewhere = other_models()
    if name in elsewhere and not Path(name).exists():
        raise ValueError(f"{name} is not loaded with visacc.load: {elsewhere[name]}")
    if Path(name).exists() or name.count("/") == 1:
        from visacc.models.hf import load_hf

        return load_hf(
            name, device=common["device"], dtype=common["dtype"], size=common["image_size"], **options
        )
    raise unknown("model", name, known_models())


def known_models() -> dict[str, str]:
    """Names that :func:`load` knows, with a line about each."""
    from visacc.models.llamagen import RELEASED
    from visacc.models.lpd.loading import available as lpd_models
    from visacc.models.shapes import EMBEDDED

    found = {name: (loader.__doc__ or "").strip().splitlines()[0] for name, loader in EMBEDDED.items()}
    found |= {name: str(entry) for name, entry in RELEASED.items() if entry.kind != "vq"}
    found |= lpd_models()
    return dict.fromkeys(model_plugins(), "added by a plug-in") | found  # a built-in name wins, as in loading


def other_models() -> dict[str, str]:
    """Models that ship or load by name but not with :func:`load`: what each is and which way leads to it."""
    from visacc.speculate.pipeline import EMBEDDED
    from visacc.video_models import known_video_models

    video = "visacc video, or visacc.video_models.load_video_model and visacc.TextToVideoPipeline"
    found = {name: f"{text}: {video}" for name, text in known_video_models().items()}
    caption = "embedded captioner of coloured shapes (vision-language model)"
    return {**found, EMBEDDED: f"{caption}: visacc caption, or visacc.speculate.CaptionPipeline"}


def _is_llamagen(path: Path) -> bool:
    """A single checkpoint file, or a folder in one of LlamaGen's layouts."""
    from visacc.models.llamagen.converted import is_converted

    if path.is_file() or is_converted(path):
        return True
    if not path.is_dir():
        return False
    config = path / "config.json"
    if config.is_file():
        return "model_type" not in read_object(config)
    return True


def _pixels(size: Any) -> int | tuple[int, int] | None:
    """One number for squares, else (height, width)."""
    if size is None or (isinstance(size, int) and not isinstance(size, bool) and size > 0):
        return size
    from visacc.models.hf.prompts import parse_size

    height, width = parse_size(size, (0, 0))
    return height if height == width else (height, width)


def _side(size: int | tuple[int, int] | None, name: str) -> int | None:
    if isinstance(size, tuple):
        raise ValueError(f"{name} draws squares; {size[0]}x{size[1]} pixels is none")
    return size


def as_device(device: str | torch.device | None) -> torch.device:
    """The device asked for, else the first GPU, else the CPU. Raises ``ValueError`` for one that is not there."""
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        found = torch.device(device)
    except RuntimeError:
        raise ValueError(f"unknown device {device!r}; use cpu, cuda or cuda:N") from None
    if found.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device {device!r} was asked for, but PyTorch sees no GPU here; use device='cpu'")
    return found


def as_dtype(dtype: str | torch.dtype | None, device: torch.device) -> torch.dtype:
    """The precision asked for, else float32 on a CPU and bfloat16 elsewhere."""
    if dtype is None:
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    if isinstance(dtype, str):
        if dtype not in DTYPES:
            raise unknown("dtype", dtype, DTYPES)
        return DTYPES[dtype]
    return dtype
