"""A model card as text: YAML that the Hugging Face hub reads, then Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from huggingface_hub import ModelCardData

from pbrl_lightning.samples import markdown_table

Facts = list[tuple[str, str]]
"""What something is, and its value in Markdown; empty values are left out."""


@dataclass(frozen=True)
class CardHead:
    """What the hub sorts models by.

    Attributes:
        library: What loads it.
        task: The hub's name of what it does.
        tags: Further words.
        base: Hub id of the model that it was made from; None if that has none.
        relation: What it is to its base.
        datasets: Hub ids of the data sets whose items or pairs it was trained on.
        license: The hub's name of the license; None if the user chose none.
    """

    library: Literal["transformers", "peft"]
    task: Literal["text-generation", "text-classification"]
    tags: list[str]
    base: str | None
    relation: Literal["finetune", "adapter"]
    datasets: list[str]
    license: str | None = None


def render(head: CardHead, title: str, opening: str, sections: Sequence[tuple[str, str]]) -> str:
    """The card.

    Args:
        head: Its YAML.
        title: Its heading.
        opening: What stands below that.
        sections: Headings and Markdown; those without a text are left out.
    """
    known: dict[str, Any] = {"library_name": head.library, "pipeline_tag": head.task, "tags": head.tags}
    if head.license is not None:
        known["license"] = head.license
    if head.base is not None:
        known |= {"base_model": head.base, "base_model_relation": head.relation}
    if head.datasets:
        known["datasets"] = head.datasets
    parts = [f"---\n{ModelCardData(**known).to_yaml()}\n---", f"# {title}", opening]
    parts += [f"## {heading}\n\n{text}" for heading, text in sections if text]
    return "\n\n".join(parts) + "\n"


def listed(facts: Facts) -> str:
    """Facts as a list."""
    return "\n".join(f"- **{name}:** {value}" for name, value in facts if value)


def table(rows: Sequence[Sequence[str]], most: int = 20) -> str:
    """A table, its head first; rows in the middle are left out where there are too many."""
    head, *body = rows
    if len(body) > most:
        places = sorted({round(place * (len(body) - 1) / (most - 1)) for place in range(most)})
        body = [body[place] for place in places]
    return markdown_table(list(head), [list(row) for row in body])
