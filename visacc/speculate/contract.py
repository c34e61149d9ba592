"""What the decode loop asks of a drafter, and drafters by name: entry points of the group ``visacc.speculators``.

A drafter is any object with the members of :class:`TextDrafter`; it need not extend anything. Three further members are
used where there are any: ``default_tree()``, ``remember(text)`` and ``forget()``, see the functions of this module.
"""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from visacc import registry
from visacc.speculate.block_tree import BlockTree
from visacc.speculate.trees import DynamicTree, Grower, TreePolicy
from visacc.speculate.views import AcceptedStep, PromptView, TargetFeatures

GROUP = "visacc.speculators"


class DraftedState(Protocol):
    """A batch's drafter state between rounds. A method ``tighten()``, where there is one, is called now and then: there
    the host may look at the device.

    Attributes:
        feature: what the session takes as the root's feature, [B, ...] ([B, K, ...] with K heads).
        logits: float32 [B, V] (or [B, K, V]), the draft law behind the root.
    """

    @property
    def feature(self) -> Tensor: ...

    @property
    def logits(self) -> Tensor: ...

    def select(self, rows: Tensor) -> None:
        """Keep only the rows int64 [R] of the batch."""


class TextDrafter(Protocol):
    """A drafter of a vision-language model: a network, the n-gram model, or an object of another package.

    Attributes:
        taps: target layers whose inputs it reads, ``()`` for none.
        ahead: tokens predicted per row.
    """

    @property
    def taps(self) -> tuple[int, ...]: ...

    @property
    def ahead(self) -> int: ...

    def prefill(self, view: PromptView, feats: TargetFeatures, root: Tensor, *, room: int) -> Any:
        """Read the prompts and the first tokens ``root`` int64 [B]; returns the batch's :class:`DraftedState`.

        Args:
            room: most positions that are appended behind the prompt.
        """

    def session(self, state: Any) -> Grower:
        """What a tree policy calls to grow one tree."""

    def observe(self, state: Any, step: AcceptedStep) -> None:
        """Bring the state up to ``step.next_root`` after a verification."""


MEMBERS = ("taps", "ahead", "prefill", "session", "observe")


def check_drafter(found: Any, origin: str) -> TextDrafter:
    """The object, if it has the members of a drafter.

    Raises:
        ValueError: it has not; names ``origin`` and what is missing.
    """
    kind = (
        f"the class {found.__name__}" if isinstance(found, type) else f"an object of {type(found).__name__}"
    )
    if isinstance(found, type):
        raise ValueError(f"{origin} is {kind}, not a drafter: pass an object of it")
    absent = [name for name in MEMBERS if not hasattr(found, name)]
    if absent:
        raise ValueError(
            f"{origin} is no drafter: {kind} has no {', '.join(absent)} (a drafter has {', '.join(MEMBERS)})"
        )
    idle = [name for name in MEMBERS[2:] if not callable(getattr(found, name))]
    if idle:
        raise ValueError(f"{origin} is no drafter: {', '.join(idle)} of {kind} cannot be called")
    ahead = found.ahead
    if isinstance(ahead, bool) or not isinstance(ahead, int) or ahead < 1:
        raise ValueError(f"{origin} is no drafter: ahead must be an integer of at least 1, got {ahead!r}")
    return found


def named_drafter(name: str, model: Any) -> TextDrafter | None:
    """The drafter that an installed package registered under ``name``, made for ``model``; ``None`` if none did.

    A plug-in that cannot be imported is reported by a warning and left out.

    Raises:
        ValueError: the plug-in makes no drafter.
        RuntimeError: making it failed.
    """
    for entry in registry._plugins(GROUP):
        if entry.name != name:
            continue
        make = registry._load_plugin(entry)
        if make is None:
            continue
        origin = f"plug-in {name!r} of {registry._package(entry)}"
        if not callable(make):
            raise ValueError(
                f"{origin} must be a function of the model that returns a drafter, got {make!r:.80}"
            )
        try:
            made = make(model)
        except Exception as error:
            raise RuntimeError(f"{origin} made no drafter: {type(error).__name__}: {error}") from error
        return check_drafter(made, f"what {origin} made")
    return None


def plugin_names() -> list[str]:
    """Names in the entry-point group, sorted."""
    return sorted({entry.name for entry in registry._plugins(GROUP)})


def default_tree(drafter: TextDrafter) -> TreePolicy:
    """The drafter's own ``default_tree()``; a block tree or EAGLE-2's tree if it has none or that returns ``None``."""
    own = getattr(drafter, "default_tree", None)
    policy = own() if own is not None else None
    if policy is not None:
        return policy
    return BlockTree(drafter.ahead) if drafter.ahead > 1 else DynamicTree(depth=4, top_k=4, budget=24)


def remember(drafter: TextDrafter, text: Tensor) -> None:
    """Tell a drafter that wants to know (``remember``) a finished output, int64 [n] without padding."""
    told = getattr(drafter, "remember", None)
    if told is not None:
        told(text)


def forget(drafter: TextDrafter | None) -> None:
    """Let a drafter drop what earlier outputs taught it (``forget``), so that measurements start alike."""
    dropped = getattr(drafter, "forget", None)
    if dropped is not None:
        dropped()
