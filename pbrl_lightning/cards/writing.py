"""Writes the cards of what a run exports."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import lightning as L

from pbrl_lightning.cards import facts
from pbrl_lightning.cards.facts import RunResults
from pbrl_lightning.cards.names import ModelName, code, formatter_name, model_name, options
from pbrl_lightning.cards.page import CardHead, listed, render, table
from pbrl_lightning.cards.usage import agent_code, reward_code
from pbrl_lightning.durable import write_atomically
from pbrl_lightning.figures import curves_figure, png
from pbrl_lightning.models.reward import JointRewardModel
from pbrl_lightning.modules.base import LearnerModule, TeamModule
from pbrl_lightning.modules.joint_reward import JointRewardModule
from pbrl_lightning.modules.marlhf import MARLHFModule
from pbrl_lightning.report import learning_panels
from pbrl_lightning.utils.errors import OptionTypeError

if TYPE_CHECKING:
    from pbrl_lightning.agents.team import AgentTeam
    from pbrl_lightning.data import PreferenceDataModule

CARD = "README.md"
CURVES = "curves.png"


@dataclass(frozen=True)
class _Run:
    """What all cards of a run share."""

    trainer: L.Trainer
    module: LearnerModule
    data: PreferenceDataModule
    results: RunResults
    drawn: bool
    license: str | None = None


def write_cards(
    trainer: L.Trainer, module: LearnerModule, results: RunResults, directory: Path, license_name: str | None = None
) -> None:
    """A ``README.md`` in each exported directory, and its curves beside it where there are some.

    Args:
        trainer: The run's.
        module: What was trained.
        results: What callbacks gathered.
        directory: What the module exported to.
        license_name: The hub's name of the license, None to state none.
    """
    from pbrl_lightning.data import PreferenceDataModule

    data = trainer.datamodule  # type: ignore[attr-defined]
    if not isinstance(data, PreferenceDataModule):
        raise OptionTypeError("a model card needs a trainer with a PreferenceDataModule")
    panels = learning_panels(results.curves)
    image = png(curves_figure(panels)) if panels else None
    run = _Run(trainer, module, data, results, image is not None, license_name)
    for name, text in _cards(run):
        target = directory / name
        if image is not None:
            (target / CURVES).write_bytes(image)
        card = text.encode(errors="replace")
        write_atomically(target / CARD, lambda file, card=card: file.write(card))  # type: ignore[misc]


def _cards(run: _Run) -> Iterator[tuple[str, str]]:
    module = run.module
    if isinstance(module, TeamModule):
        for agent in range(module.team.num_agents):
            yield f"agent_{agent}", _agent_card(run, module.team, agent)
    if isinstance(module, MARLHFModule | JointRewardModule):
        yield "reward_model", _reward_card(run, module.reward_model)


def _agent_card(run: _Run, team: AgentTeam, agent: int) -> str:
    source = _source(team, agent)
    adapter = team.adapter(agent) is not None
    roles = len(team.roles) if team.roles is not None else None
    several = (roles or team.num_agents) > 1
    head = CardHead(
        library="peft" if adapter else "transformers",
        task="text-generation",
        tags=[*facts.tags(run.module, several), *facts.policy_tags(run.module), *(["lora"] if adapter else [])],
        base=source.hub,
        relation="adapter" if adapter else "finetune",
        datasets=_datasets(run.data),
        license=run.license,
    )
    if roles is not None:
        title = f"One model for {roles} roles"
        opening = f"One language model that writes the responses of {roles} roles in one text."
    else:
        title = f"Agent {agent} of a team of {team.num_agents}"
        opening = (
            f"One of {team.num_agents} language models that were trained together and answer side by side, each from "
            f"its own prompt: `agent_0` to `agent_{team.num_agents - 1}`."
            if several
            else "A language model that was trained as a team of one."
        )
    sections = [
        *_run_sections(run, [("The team", _team(team, agent))]),
        ("How to load it", f"```python\n{agent_code(team.formatters[agent], run.data.sampling, adapter)}\n```"),
        ("Limits", _agent_limits(run, source, adapter, several and roles is None)),
    ]
    return render(head, title, f"{opening} {_MADE}", sections)


_MADE = "Made with pbrl-lightning."


def _source(team: AgentTeam, agent: int) -> ModelName:
    given = team.given_name(agent)
    return model_name(given or team.source_name(agent), in_memory=given is None)


def _team(team: AgentTeam, agent: int) -> str:
    lines = []
    for place in range(team.num_agents):
        mark = " (this one)" if place == agent and team.num_agents > 1 else ""
        prompt = "" if team.roles is not None else f"; formatter {formatter_name(team.formatters[place])}"
        lines.append((f"agent {place}{mark}", f"from {_source(team, place).words}; {_trained(team, place)}{prompt}"))
    if team.roles is not None:
        lines += [(f"role {i}", f"formatter {formatter_name(made)}") for i, made in enumerate(team.roles.formatters)]
        lines.append(("joint adapter", code(type(team.roles.adapter).__name__)))
    return listed(lines)


def _trained(team: AgentTeam, agent: int) -> str:
    name = team.adapter(agent)
    if name is None:
        return "all weights trained"
    config = team.backbone(agent).peft_config[name]
    given = {"r": getattr(config, "r", None), "alpha": getattr(config, "lora_alpha", None)}
    targets = getattr(config, "target_modules", None)
    if isinstance(targets, set | list):
        given["target_modules"] = sorted({target.rsplit(".")[-1] for target in targets})
    return f"an adapter trained, {code(options({key: value for key, value in given.items() if value is not None}))}"


def _reward_card(run: _Run, model: JointRewardModel) -> str:
    team = run.module.team if isinstance(run.module, TeamModule) else None
    source = _reward_source(model, team)
    pairs = run.data.training_pairs
    num_agents = team.num_agents if team is not None else len(pairs[0].prompts) if pairs else None
    head = CardHead(
        library="transformers",
        task="text-classification",
        tags=[*facts.tags(run.module, (num_agents or 2) > 1), "reward-model"],
        base=source.hub,
        relation="finetune",
        datasets=_datasets(run.data),
        license=run.license,
    )
    limit = f" Longer texts than {model.length_limit} tokens were cut on the left." if model.length_limit else ""
    opening = (
        "A reward model: it reads all prompts and all responses of a team as one text, and gives one number. Higher is "
        f"better; only differences between responses to the same prompts mean something. {_MADE}"
    )
    how = "an adapter, merged into the weights here" if model.lora is not None else "all weights trained"
    how = "only the head trained" if model.freeze_backbone else how
    made = listed([("backbone", f"from {source.words}; {how}"), ("fitted to", _fitted_to(run))])
    held_out = listed(facts.held_out(run.results)) if isinstance(run.module, JointRewardModule) else ""
    sections = [
        *_run_sections(run, [("The model", made), ("Held-out pairs", held_out)]),
        ("How to load it", f"```python\n{reward_code(num_agents, *model.closing_ids)}\n```"),
        ("Limits", f"- It knows the answers of the team that its pairs are of.{limit}\n{_limits(run)}"),
    ]
    return render(head, "Reward model of a team", opening, sections)


def _fitted_to(run: _Run) -> str:
    if run.data.iterative and run.data.rounds:
        return f"the {run.data.rounds[-1].train_pairs} pairs of the last round: it is newly initialised in each"
    return "all pairs of the run"


def _reward_source(model: JointRewardModel, team: AgentTeam | None) -> ModelName:
    if model.shared and team is not None:
        source = _source(team, 0)
        return ModelName(f"the team's frozen backbone, {source.words}", source.hub)
    return model_name(model.given_name, in_memory=model.given_name is None)


def _run_sections(run: _Run, described: list[tuple[str, str]]) -> list[tuple[str, str]]:
    results = run.results
    curves = [facts.evaluations(results)]
    curves += [f"Round by round:\n\n{table(results.rounds)}"] if len(results.rounds) > 2 else []
    curves += [f"![curves]({CURVES})"] if run.drawn else ["The run had no logger, so there are no curves."]
    return [
        ("How it was trained", listed(facts.training(run.trainer, run.module, run.data)) + _resumed(run)),
        *described,
        ("Data", listed(facts.items(run.module, run.data, results))),
        ("Reward", listed(facts.reward(run.module, run.data))),
        ("Results", "\n\n".join(text for text in curves if text)),
        ("Versions", listed(facts.versions())),
    ]


def _resumed(run: _Run) -> str:
    if run.trainer.ckpt_path is None:
        return ""
    return (
        "\n\nThe run was stopped and resumed. The numbers here are of all of it, but for what was cut or dropped, "
        "which is counted since the last start; options and versions are those of the last start."
    )


def _agent_limits(run: _Run, source: ModelName, adapter: bool, several: bool) -> str:
    lines = []
    if several:
        lines.append("- It was trained to answer beside the other agents: alone it gives its own share of an answer.")
    if adapter and source.hub is None:
        lines.append(
            "- `adapter_config.json` names the base by where it lay in training. Elsewhere load the base yourself and "
            "give it: `PeftModel.from_pretrained(base, directory)`."
        )
    return "\n".join([*lines, _limits(run)])


def _limits(run: _Run) -> str:
    lines = ["- Whatever raises the reward was learned, wanted or not."]
    if run.results.evaluations:
        lines.append("- The evaluation is of few items, by the reward of the training; it is no benchmark.")
    unstated = "" if run.license is not None else " No license is stated: it depends on both."
    lines.append(f"- What holds for the base model and the data holds here too.{unstated}")
    return "\n".join(lines)


def _datasets(data: PreferenceDataModule) -> list[str]:
    """Hub ids of the data sets that task items and pairs were named by."""
    trained_on = "; ".join(data.sources.get(name, "") for name in ("items", "pairs"))
    return list(dict.fromkeys(re.findall(r"`datasets:([^:`]+)[^`]*`", trained_on)))
