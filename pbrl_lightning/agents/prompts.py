"""Task item to prompt text, and text to token ids."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from string import Formatter as FieldParser
from typing import Any

from transformers import PreTrainedTokenizerBase

from pbrl_lightning.agents.conversations import Message, checked_messages, conversation_of, is_chat
from pbrl_lightning.batches import TaskItem
from pbrl_lightning.importing import import_object
from pbrl_lightning.text_gate import control_tokens, encodable_text, is_null, map_texts, neutralize
from pbrl_lightning.utils.errors import ConfigurationError

Formatter = Callable[[TaskItem], Any]
"""Task item to a prompt string, or to a list of chat messages that the tokenizer's chat template renders."""


class _Fields(dict[str, Any]):
    def __missing__(self, key: str) -> Any:
        fields = ", ".join(sorted(map(repr, self))) or "none"
        raise ConfigurationError(f"the template names the field {key!r}, but the task item has: {fields}")


def _whole_fields(template: str) -> set[str]:
    """The fields that a template puts in as they are, not parts of them such as ``{prompt[0]}``."""
    return {name for _, name, _, _ in FieldParser().parse(template) if name}


class _EmptyNulls(FieldParser):
    def get_field(self, field_name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        value, key = super().get_field(field_name, args, kwargs)
        return ("" if is_null(value) else value), key


def _check_nulls(template: str, item: Mapping[str, Any]) -> None:
    for _, field, _, _ in FieldParser().parse(template):
        if not field:
            continue
        value, _ = FieldParser().get_field(field, (), _Fields(item))
        if is_null(value):
            raise ConfigurationError(
                f"the template {template!r} puts in the field {field!r}, which is {value} in the task item: give it a "
                "text, or set `empty_nulls` of the template to have an empty text there"
            )


def _fill(template: str, item: Mapping[str, Any], empty_nulls: bool = False) -> str:
    try:
        for field in _whole_fields(template):
            if is_chat(item.get(field)):
                raise ConfigurationError(
                    f"the template {template!r} makes a text, and the task item's {field!r} is a list of chat "
                    "messages: `{prompt}` alone keeps them, ChatTemplate puts its text in the place of the last one's, "
                    "and a callable may do anything else"
                )
        if empty_nulls:
            return _EmptyNulls().vformat(template, (), _Fields(item))
        _check_nulls(template, item)
        return template.format_map(_Fields(item))
    except (IndexError, KeyError, AttributeError) as error:
        raise ConfigurationError(f"the template {template!r} cannot be filled from the task item: {error}") from error


class PromptTemplate:
    """A plain prompt such as ``"Summarise: {prompt}"``; ``{name}`` is replaced by the item's field.

    ``{prompt}`` alone leaves a conversational item's messages as they are.

    Args:
        text: The template.
        empty_nulls: Put in an empty text for a field that is null or NaN, instead of refusing the item.

    Example:
        >>> PromptTemplate("Explain: {prompt}")({"prompt": "rain"})
        'Explain: rain'
        >>> PromptTemplate("{prompt}")({"messages": [{"role": "user", "content": "Hi"}]})
        [{'role': 'user', 'content': 'Hi'}]
    """

    def __init__(self, text: str, empty_nulls: bool = False) -> None:
        self.text = text
        self.empty_nulls = empty_nulls

    def __call__(self, item: TaskItem) -> str | list[Message]:
        """The prompt of one task item."""
        messages = conversation_of(item, self.text[1:-1]) if self.text in ("{prompt}", "{messages}") else None
        return _fill(self.text, item, self.empty_nulls) if messages is None else messages


class ChatTemplate:
    """A user message, and a system message before it, rendered by the tokenizer's own chat template.

    In a conversational item (``prompt``, or without it ``messages``, is a list of chat messages) ``{prompt}`` stands
    for the text of the last message, which gets the new text; the messages before it stay. A system message goes before
    the item's own, in one message.

    Args:
        user: The template of the user's message.
        system: The template of the system message; None for none.
        empty_nulls: Put in an empty text for a field that is null or NaN, instead of refusing the item.

    Example:
        >>> ChatTemplate("{prompt}", system="Be brief.")({"prompt": "Hi"})[1]
        {'role': 'user', 'content': 'Hi'}
        >>> chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes?"}]
        >>> ChatTemplate("Explain: {prompt}")({"prompt": [*chat, {"role": "user", "content": "rain"}]})[2]
        {'role': 'user', 'content': 'Explain: rain'}
    """

    def __init__(self, user: str = "{prompt}", system: str | None = None, empty_nulls: bool = False) -> None:
        self.user = user
        self.system = system
        self.empty_nulls = empty_nulls

    def __call__(self, item: TaskItem) -> list[Message]:
        """The messages of one task item."""
        chat = conversation_of(item) if "prompt" in _whole_fields(self.user) else None
        *before, last = chat if chat is not None else [{"role": "user", "content": None}]
        if chat is not None:
            item = {**item, "prompt": last["content"]}
            if last["role"] != "user" and self.user != "{prompt}":
                raise ConfigurationError(
                    f"the template {self.user!r} is for a user's message, but the last one's role is {last['role']!r}"
                )
        messages = [*before, {**last, "content": _fill(self.user, item, self.empty_nulls)}]
        if self.system is None:
            return messages
        system = {"role": "system", "content": _fill(self.system, item, self.empty_nulls)}
        if messages[0]["role"] == "system":
            system["content"] += f"\n\n{messages.pop(0)['content']}"
        return [system, *messages]


def resolve_formatters(formatters: Any, num_agents: int) -> list[Formatter]:
    """One formatter per agent.

    Args:
        formatters: None (the item's ``prompt`` as it is), one formatter for all agents, or a list of one per agent.
            A formatter is a template string, a callable, or the import path of a callable or of a list of them.
        num_agents: Number of agents.

    Raises:
        ConfigurationError: If the number of formatters differs from the number of agents, or one is of another type.
    """
    if isinstance(formatters, str) and "{" not in formatters:
        formatters = import_object(formatters)
    if formatters is None:
        formatters = "{prompt}"
    if isinstance(formatters, str) or callable(formatters):
        formatters = [formatters] * num_agents
    if not isinstance(formatters, Sequence) or len(formatters) != num_agents:
        count = len(formatters) if isinstance(formatters, Sequence) else formatters
        raise ConfigurationError(
            f"`formatters` must be one for all or one per agent ({num_agents} agents), got {count}"
        )
    resolved: list[Formatter] = []
    for agent, formatter in enumerate(formatters):
        if isinstance(formatter, str):
            formatter = PromptTemplate(formatter) if "{" in formatter else import_object(formatter)
        if not callable(formatter):
            raise ConfigurationError(
                f"`formatters[{agent}]` must be a template string or a callable (in a file also `class_path: "
                f"pbrl_lightning.ChatTemplate` with its `init_args`), got {formatter!r}"
            )
        resolved.append(formatter)
    return resolved


def made_prompt(formatter: Formatter, item: TaskItem) -> str | list[Message]:
    """What a formatter makes of a task item, checked.

    Raises:
        ConfigurationError: If it is neither a text nor a list of chat messages, or a message is malformed.
    """
    prompt = formatter(item)
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, list) and prompt and any(isinstance(message, dict) for message in prompt):
        return checked_messages("the prompt", prompt)
    raise ConfigurationError(f"a formatter must return a string or a list of chat messages, got {prompt!r}")


def check_prompts(formatters: Sequence[Formatter], items: Iterable[TaskItem], name: str) -> None:
    """Finds items that templates of this library cannot read, before anything is loaded.

    Args:
        formatters: Of all agents.
        items: Task items.
        name: What to call them in errors.

    Raises:
        ConfigurationError: Names the item, and the agent or the message.
    """
    templates = {
        agent: made for agent, made in enumerate(formatters) if isinstance(made, PromptTemplate | ChatTemplate)
    }
    for index, item in enumerate(items):
        for agent, template in templates.items():
            try:
                template(item)
            except ValueError as error:
                chat = isinstance(item.get("prompt", item.get("messages")), list)
                whose = "" if chat else f"the formatter of agent {agent} failed on "
                raise ConfigurationError(f"`{name}`: {whose}task item {index}: {error}") from error


def gated_item(item: TaskItem, tokenizer: PreTrainedTokenizerBase) -> TaskItem:
    """A task item whose control tokens are text; itself if it has none."""
    controls = control_tokens(tokenizer)
    gated: TaskItem = map_texts(item, lambda text: neutralize(encodable_text(text), controls))
    return gated


def render_prompt(formatter: Formatter, item: TaskItem, tokenizer: PreTrainedTokenizerBase) -> str:
    """The prompt text of one task item for one agent; control tokens that the item writes out are text in it."""
    return render_gated(formatter, gated_item(item, tokenizer), tokenizer)


def render_gated(formatter: Formatter, item: TaskItem, tokenizer: PreTrainedTokenizerBase) -> str:
    """The same for an item of :func:`gated_item`."""
    prompt = made_prompt(formatter, item)
    return prompt if isinstance(prompt, str) else render_chat(prompt, tokenizer)


def render_chat(messages: list[Message], tokenizer: PreTrainedTokenizerBase) -> str:
    """Chat messages as text, ending where the assistant's turn begins.

    Templates that refuse the system role (Gemma's, for one) get its text at the head of the first user message.
    """
    if not tokenizer.chat_template:
        raise ConfigurationError(
            f"chat messages need a tokenizer with a chat template, and {tokenizer.name_or_path!r} has none; use a "
            "template string such as 'Summarise: {prompt}', or, where the items are chats, a callable that makes a text"
        )
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    except Exception:
        if messages[0].get("role") != "system" or len(messages) < 2:
            raise
    system, user, *rest = messages
    warnings.warn(
        f"the chat template of {tokenizer.name_or_path!r} takes no system role; its text goes before the user's",
        stacklevel=2,
    )
    folded = {**user, "content": f"{system['content']}\n\n{user['content']}"}
    return str(tokenizer.apply_chat_template([folded, *rest], tokenize=False, add_generation_prompt=True))


def render_messages(
    tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]], add_generation_prompt: bool
) -> str:
    """Chat messages of a pair file as text: by the tokenizer's chat template, or as ``role: content`` without one."""
    controls = control_tokens(tokenizer)
    messages = map_texts(messages, lambda text: neutralize(encodable_text(text), controls))
    if tokenizer.chat_template:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=add_generation_prompt))
    return render_plainly(messages, add_generation_prompt)


def render_plainly(messages: list[dict[str, str]], add_generation_prompt: bool) -> str:
    r"""Chat messages without a template: a line ``role: content`` each.

    Example:
        >>> render_plainly([{"role": "user", "content": "Hi"}], add_generation_prompt=True)
        'user: Hi\nassistant: '
    """
    lines = "".join(f"{message['role']}: {message['content']}\n" for message in messages)
    return lines + "assistant: " if add_generation_prompt else lines


def plain_text(prompt: str | list[Message]) -> str:
    r"""A prompt as bare text, for readers that are not sent through a chat template.

    A system and a user message are their texts; in a longer conversation it is said who speaks.

    Example:
        >>> plain_text([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}])
        'Be brief.\n\nHi'
        >>> turns = [("user", "Hi"), ("assistant", "Yes?"), ("user", "Rain")]
        >>> plain_text([{"role": role, "content": content} for role, content in turns])
        'user: Hi\n\nassistant: Yes?\n\nuser: Rain'
    """
    if isinstance(prompt, str):
        return prompt
    if [message["role"] for message in prompt if message["role"] != "system"] in ([], ["user"]):
        return "\n\n".join(message["content"] for message in prompt)
    return "\n\n".join(f"{message['role']}: {message['content']}" for message in prompt)


def encode_prompt(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Token ids of a prompt: special tokens added unless the text already begins with one; never empty.

    Data cannot begin with one (:func:`render_prompt`): it is a template's own, which then wrote all there is to be.
    """
    text = encodable_text(text)
    begun = text.startswith(tuple(control_tokens(tokenizer)))
    ids = list(tokenizer(text, add_special_tokens=not begun)["input_ids"])
    # Some tokenizers close every text with EOS: a prompt is not a finished text.
    if ids and ids[-1] == tokenizer.eos_token_id and not text.endswith(str(tokenizer.eos_token)):
        ids.pop()
    if not ids:
        start = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
        if start is None:
            raise ConfigurationError("an empty prompt needs a tokenizer with a BOS or EOS token")
        ids = [start]
    return ids


def encode_response(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Token ids of a response text, without special tokens."""
    return list(tokenizer(encodable_text(text), add_special_tokens=False)["input_ids"])


def joint_prompt(prompts: Sequence[str]) -> str:
    r"""All agents' prompts as one text; a single agent's is itself.

    Example:
        >>> joint_prompt(["Sum up: rain", "Explain: rain"])
        '### Prompt of agent 0\nSum up: rain\n\n### Prompt of agent 1\nExplain: rain\n\n'
    """
    if len(prompts) == 1:
        return prompts[0]
    return "".join(f"### Prompt of agent {agent}\n{prompt}\n\n" for agent, prompt in enumerate(prompts))


def joint_response(responses: Sequence[str]) -> str:
    r"""All agents' responses as one text, to follow :func:`joint_prompt`; a single agent's is itself.

    Example:
        >>> joint_response(["Wet.", "Water falls."])
        '### Response of agent 0\nWet.\n\n### Response of agent 1\nWater falls.'
    """
    if len(responses) == 1:
        return responses[0]
    return "\n\n".join(f"### Response of agent {agent}\n{response}" for agent, response in enumerate(responses))


def without_starts(tokenizer: PreTrainedTokenizerBase, prompts: Sequence[str]) -> Sequence[str]:
    """Prompts of several agents without the BOS text of their chat templates: the joint text has one BOS."""
    bos = tokenizer.bos_token
    return prompts if len(prompts) == 1 or not bos else [prompt.removeprefix(str(bos)) for prompt in prompts]


def without_end(tokenizer: PreTrainedTokenizerBase, side: Sequence[str]) -> str:
    """The joint response without the EOS text that chat templates close an answer with."""
    text, eos = joint_response(side) if side else "", tokenizer.eos_token
    closed = text.rstrip()
    return closed.removesuffix(str(eos)) if eos and closed.endswith(str(eos)) else text
