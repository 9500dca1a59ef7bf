"""The settings of the daemon as frozen models: every key of the TOML file with its default, range, unit and meaning.

One class a `[section]`; each part of the daemon receives its own section. The descriptions are the comments of
`deploy/edged.toml`. A key marked `live` takes effect on SIGHUP, every other key at the next start. Reading the file and
wording its mistakes is the work of `edged.config`. Nothing here looks at the machine: whether a path exists or a port
is free is found out by who uses it.
"""

from __future__ import annotations

from edged.settings.adapters import AdaptersSection, WatchSection
from edged.settings.judging import GateSection, PracticeSection, RewardSection
from edged.settings.keys import Section
from edged.settings.learning import JUDGED, LearnSection, LoraSection, learns_from_judged, parse_objectives
from edged.settings.machine import LogSection, PlacementSection, StoreSection
from edged.settings.serving import ApiSection, ModelSection, ServeSection

__all__ = [
    "JUDGED",
    "AdaptersSection",
    "ApiSection",
    "GateSection",
    "LearnSection",
    "LogSection",
    "LoraSection",
    "ModelSection",
    "PlacementSection",
    "PracticeSection",
    "RewardSection",
    "Section",
    "ServeSection",
    "Settings",
    "StoreSection",
    "WatchSection",
    "learns_from_judged",
    "parse_objectives",
]


class Settings(Section):
    """The whole file."""

    model: ModelSection = ModelSection()
    lora: LoraSection = LoraSection()
    serve: ServeSection = ServeSection()
    learn: LearnSection = LearnSection()
    reward: RewardSection = RewardSection()
    practice: PracticeSection = PracticeSection()
    gate: GateSection = GateSection()
    watch: WatchSection = WatchSection()
    adapters: AdaptersSection = AdaptersSection()
    placement: PlacementSection = PlacementSection()
    api: ApiSection = ApiSection()
    store: StoreSection = StoreSection()
    log: LogSection = LogSection()
