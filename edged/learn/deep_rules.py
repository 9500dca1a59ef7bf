"""When the deep gate looks at a version, against which one, over how many answers, and whether it rolls back. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from edged.records import Adapter, Live

ANSWER_TOKENS = 64  # of an answer at most
PROMPTS_MAX = 24
SAMPLES_MAX = 4  # answers to a prompt by one version: beyond, other prompts tell more
ANCESTORS = 8  # that are looked through for one that has passed

Shape = tuple[int, int]


def is_due(live: Live, adapter: Adapter) -> bool:
    """Whether what is live has to be looked at, or a rollback was cut off by a stop."""
    if live.version == 0:
        return False
    deep = adapter.deep
    return deep is None or (deep.verdict == "refused" and deep.rolled_back_to is None and not deep.kept_why)


def compared_with(version: int, adapters: Mapping[int, Adapter], on_disk: Collection[int]) -> int:
    """The version that `version` has to be no worse than: its nearest ancestor that has passed, so that one which was
    replaced before it was looked at is no excuse. That may be the base. Its parent where none is near; the base where
    the files of that are gone.

    Args:
        adapters: by version. on_disk: versions whose files are there.
    """
    ancestor = adapters[version].parent_version
    for _ in range(ANCESTORS):
        if ancestor == 0:
            return 0
        if ancestor is None or ancestor not in adapters:
            break
        deep = adapters[ancestor].deep
        if deep is not None and deep.verdict == "passed" and ancestor in on_disk:
            return ancestor
        ancestor = adapters[ancestor].parent_version
    parent = adapters[version].parent_version or 0
    return parent if parent in on_disk else 0


def shape(known: int, budget_tokens: int) -> Shape:
    """How many prompts, and how many answers of each version to one of them: both within the budget, prompts first.

    Args:
        known: prompts that there are. budget_tokens: of all answers of both versions together.
    """
    affordable = budget_tokens // (2 * ANSWER_TOKENS)
    prompts = min(known, PROMPTS_MAX, affordable)
    return (prompts, min(SAMPLES_MAX, affordable // prompts)) if prompts else (0, 0)


def objection(live: Live, version: int) -> str:
    """Why a refused version is not rolled back; "" if it is."""
    if live.version != version:
        return f"v{version} is not live any more, v{live.version} is"
    if live.pinned:
        return f"v{version} is pinned; unpin it and roll back if you agree"
    if live.why == "promoted":
        return f"{live.caller} promoted v{version}; roll back if you agree"
    return ""
