"""How to load what was exported, as Python that needs transformers and PEFT only."""

from __future__ import annotations

from string import Formatter as FieldParser

from pbrl_lightning.agents.prompts import ChatTemplate, Formatter, PromptTemplate
from pbrl_lightning.agents.sampling import SamplingConfig

_MOST = 2000
"""Characters of a template that is written out."""

HERE = 'directory = "."  # where this card lies, or its name on the hub'


def agent_code(formatter: Formatter, sampling: SamplingConfig, adapter: bool) -> str:
    """Loads an agent and samples a response."""
    library = "from peft import AutoPeftModelForCausalLM\n" if adapter else ""
    names = "AutoTokenizer" if adapter else "AutoModelForCausalLM, AutoTokenizer"
    loader = "AutoPeftModelForCausalLM" if adapter else "AutoModelForCausalLM"
    return f"""{library}from transformers import {names}

{HERE}
model = {loader}.from_pretrained(directory).eval()
tokenizer = AutoTokenizer.from_pretrained(directory)
{_inputs(formatter)}
outputs = model.generate(**inputs, max_new_tokens={sampling.max_new_tokens}, {_how(sampling)})
response = tokenizer.decode(outputs[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)"""


def _inputs(formatter: Formatter) -> str:
    if isinstance(formatter, ChatTemplate) and _is_plain(formatter.user) and _is_plain(formatter.system or ""):
        system = "" if formatter.system is None else f'{{"role": "system", "content": {_filled(formatter.system)}}}, '
        return (
            f'messages = [{system}{{"role": "user", "content": {_filled(formatter.user)}}}]\n'
            "prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)\n"
            "has_start = bool(tokenizer.bos_token) and prompt.startswith(tokenizer.bos_token)\n"
            'inputs = tokenizer(prompt, add_special_tokens=not has_start, return_tensors="pt")'
        )
    if isinstance(formatter, PromptTemplate) and _is_plain(formatter.text):
        prompt = _filled(formatter.text)
    else:
        prompt = '"…"  # what the formatter makes of a task item'
    return f'prompt = {prompt}\ninputs = tokenizer(prompt, return_tensors="pt")'


def _fields(template: str) -> list[str]:
    return list(dict.fromkeys(name for _, name, _, _ in FieldParser().parse(template) if name is not None))


def _is_plain(template: str) -> bool:
    return len(template) <= _MOST and all(name.isidentifier() for name in _fields(template))


def _filled(template: str) -> str:
    """A template with a placeholder for each of its fields."""
    fields = ", ".join(f'{name}="…"' for name in _fields(template))
    return f"{template!r}.format({fields})" if fields else repr(template.format())


def _how(sampling: SamplingConfig) -> str:
    if sampling.temperature == 0:
        return "do_sample=False"
    top_k = sampling.top_k or 0
    return f"do_sample=True, temperature={sampling.temperature}, top_p={sampling.top_p}, top_k={top_k}"


_READ = "  # of each agent; a prompt without the BOS text of its chat template"


def reward_code(num_agents: int | None, ends_with: int | None = None) -> str:
    """Loads a reward model and scores a joint response.

    Args:
        num_agents: Texts of a joint response; None for a number that is not known.
        ends_with: The token that closes the text, None if nothing does.
    """
    closing, said = ("", "no EOS at the end") if ends_with is None else (f" + [{ends_with}]", "EOS closes the text")
    if num_agents == 1:
        texts = f'prompt, response = "…", "…"{_READ}'
    else:
        blanks = str(["…"] * (num_agents or 2)).replace("'", '"')
        texts = f"""prompts, responses = {blanks}, {blanks}{_READ}
prompt = "".join(f"### Prompt of agent {{i}}\\n{{text}}\\n\\n" for i, text in enumerate(prompts))
response = "\\n\\n".join(f"### Response of agent {{i}}\\n{{text}}" for i, text in enumerate(responses))"""
    return f"""import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

{HERE}
model = AutoModelForSequenceClassification.from_pretrained(directory).eval()
tokenizer = AutoTokenizer.from_pretrained(directory)
{texts}
# Apart, so that no token crosses the border; {said}.
ids = tokenizer(prompt)["input_ids"] + tokenizer(response, add_special_tokens=False)["input_ids"]{closing}
with torch.no_grad():
    score = model(torch.tensor([ids])).logits[0, 0].item()"""
