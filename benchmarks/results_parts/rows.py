"""What is run: the rows of docs/results.md, each with its configuration."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, replace
from typing import Final

COORDINATION: Final = "pbrl_lightning.tasks.coordination"
API_URL: Final = "http://127.0.0.1:8000/generate"
"""Where the commands of the page expect `benchmarks/results_parts/server.py`."""


TABLES: Final = ("sparse", "dense", "writing")
SEEDS: Final = (0, 1, 2)


@dataclass(frozen=True)
class Row:
    """A run that is repeated with several seeds.

    Attributes:
        table: Which of :data:`TABLES` it stands in.
        title: What the table calls it.
        config: Its configuration.
        options: What is given besides.
        group: The picture's panel.
        responses: Joint responses to each evaluation item.
        seeds: Those of the page.
        control: True where nothing may be learned.
    """

    table: str
    title: str
    config: str
    options: tuple[str, ...] = ()
    group: str = "MADPO"
    responses: int = 32
    seeds: tuple[int, ...] = SEEDS
    control: bool = False

    @property
    def name(self) -> str:
        """Table and title in one word, for `--only`."""
        return f"{self.table}/{self.title.replace(', ', '_').replace(' ', '_')}"

    @property
    def uses_server(self) -> bool:
        """True if it asks a remote model."""
        return "_api" in self.config

    def arguments(self, seed: int) -> list[str]:
        """What follows `pbrl fit`."""
        return [f"--config={self.config}", f"--data.seed={seed}", *self.options]

    def command(self, seed: int) -> str:
        """What a user types in the root of the repository."""
        options = ["--config", self.config, f"--data.seed={seed}", *self.options]
        return " ".join(["pbrl fit", *map(shlex.quote, options)])


def _coin(row: Row) -> Row:
    """The same run on preferences that a coin decides."""
    options = (*row.options, "--data.judge=benchmarks.results_parts.controls.CoinJudge")
    return replace(row, title=f"{row.title}, random preferences", options=options, control=True)


def _class(option: str, name: str, **init_args: object) -> str:
    inner = ", ".join(f"{key}: {value}" for key, value in init_args.items())
    return f"--{option}={{class_path: {name}, init_args: {{{inner}}}}}"


TEAM: Final = "builtin:letters"
LAST: Final = ("--model.init_args.score_last_token=true",)
"""The reward looks at the last letter, which MADPO leaves out by default."""
EVERY_PAIR: Final = "--data.pair_selection=all"
"""The default takes the pairs that the comparator won first, and a comparator that never learns would hold the team."""
MORE_ROUNDS: Final = "--model.init_args.num_iterations=15"
COMPARATORS: Final = {
    "CurrentComparator": (),
    "CurrentCopyComparator": (_class("data.comparator", "CurrentCopyComparator", devices="[cpu]"),),
    "HistoryComparator": (_class("data.comparator", "HistoryComparator", k=2),),
    "ModelComparator": (_class("data.comparator", "ModelComparator", models=TEAM), EVERY_PAIR, MORE_ROUNDS),
    "CentralizedGeneration": (
        "--data.comparator={class_path: CurrentComparator, init_args: {centralized: "
        f"{{adapter: {{class_path: {COORDINATION}.CharacterAdapter}}}}}}}}",
    ),
}
REPLAYS: Final = {
    "AllHistoryReplay": ("--data.replay=AllHistoryReplay",),
    "LambdaDecayReplay": (_class("data.replay", "LambdaDecayReplay", decay=0.8),),
    "NearestKReplay": (_class("data.replay", "NearestKReplay", k=3),),
}
API_BUDGET: Final = ("--model.init_args.num_iterations=10", "--data.num_candidates=20", EVERY_PAIR)
MARLHF: Final = {"MARLHF": "results/tiny_marlhf", "iterative MARLHF": "results/tiny_marlhf_iter"}
POLICY: Final[dict[str, tuple[str, tuple[str, ...]]]] = {
    "MAGRPO": ("debug/marl_magrpo", ()),
    "MAREINFORCE": ("debug/marl_mareinforce", ()),
    "MARLOO": ("debug/marl_marloo", ()),
    "MAReMax": ("debug/marl_maremax", ()),
    "MAAC": ("debug/marl_maac", ()),
    "IAC, attached critics": ("debug/marl_iac", ()),
    "IAC, separate critics": ("debug/marl_iac", ("--model.init_args.critic=SeparateCritics",)),
}


def _coordination(table: str, reward: str) -> list[Row]:
    """The tiny team's rows."""
    scored = (f"--data.reward_func={COORDINATION}.{reward}",) if reward != "same_last_letter" else ()
    scored = (f"--model.init_args.team.init_args.models={TEAM}", "--data.sampling.max_new_tokens=1", *scored)

    def row(title: str, config: str, *options: str, group: str) -> Row:
        last = LAST if "debug/madpo" in config else ()
        return Row(
            table,
            title,
            f"configs/{config}.yaml",
            (*(scored if "debug" in config else scored[2:]), *last, *options),
            group,
        )

    by_gap = ("--data.pair_selection=reward_gap",) if table == "dense" else ()  # a sparse reward has one gap
    once = row("MADPO", "results/tiny_madpo", *by_gap, group="MADPO and comparators")
    compared = {
        name: row(f"iterative MADPO, {name}", "debug/madpo_iter", *given, group=once.group)
        for name, given in COMPARATORS.items()
    }
    rounds = compared["CurrentComparator"]
    marlhf = [
        row(title, config, *(by_gap if title == "MARLHF" else ()), group="MARLHF") for title, config in MARLHF.items()
    ]
    controls = [once, rounds, *marlhf]
    return [
        once,
        *compared.values(),
        row("iterative MADPO, ApiComparator", "debug/madpo_iter_api", *API_BUDGET, group=once.group),
        *(
            row(f"iterative MADPO, {name}", "debug/madpo_iter", *given, group="replay")
            for name, given in REPLAYS.items()
        ),
        *marlhf,
        *(row(name, config, *given, group="policy learning") for name, (config, given) in POLICY.items()),
        *(replace(_coin(control), group="controls") for control in controls),
    ]


def _writing() -> list[Row]:
    """SmolLM2's rows."""
    titles = {"MADPO": "madpo", "iterative MADPO": "madpo_iter", "MARLHF": "marlhf", "iterative MARLHF": "marlhf_iter"}
    rows = [
        Row("writing", title, f"configs/results/smollm2_{config}.yaml", group=title.split()[-1], responses=4)
        for title, config in titles.items()
    ]
    return [*rows, _coin(rows[1])]


ROWS: Final[list[Row]] = [
    *_coordination("sparse", "same_last_letter"),
    *_coordination("dense", "close_last_letters"),
    *_writing(),
]
"""Every row, in the page's order."""
