"""What a report's page says and shows: its head, options, numbers, curves with errors and smoothing, wrapped tables."""

import math
import re
from html.parser import HTMLParser
from types import SimpleNamespace

import pytest
import yaml
from lightning.pytorch.cli import LightningArgumentParser
from markdown import Markdown
from tensorboard.plugin_util import markdown_to_safe_html
from test_report import HOSTILE, Page, curve, safe

from pbrl_lightning import MADPOModule
from pbrl_lightning.batches import Response, TeamSample
from pbrl_lightning.cli import ConfigSaver
from pbrl_lightning.curves import Curve, agent_names, error_name, smoothed, standard_error
from pbrl_lightning.figures import PAGE_COLORS, curve_figure, pixels, svg
from pbrl_lightning.panels import PANELS, filled_panels, is_drawn, learning_panels
from pbrl_lightning.preferences.collector import Collection, outcome
from pbrl_lightning.report import RunSummary, render
from pbrl_lightning.report_facts import configuration, models, options, phases
from pbrl_lightning.report_style import STYLE
from pbrl_lightning.rounds import collection_details
from pbrl_lightning.samples import (
    MOST_LINES,
    SHORT_WIDTH,
    TABLE_WIDTH,
    JointSample,
    mean_lengths,
    response_tokens,
    table_of,
    wrapped_cells,
    wrapped_table,
)
from pbrl_lightning.timing import duration, pending_seconds, spending, take_seconds
from training_runs import make_data, make_module, make_team, make_trainer

pytestmark = pytest.mark.figures


def sections(text):
    """Heading of each section to the texts in it, and those above the first."""
    parts = re.split(r"<h2>(.*?)</h2>", text.partition("</style>")[2])
    return {"": texts(parts[0])} | {
        heading: texts(html) for heading, html in zip(parts[1::2], parts[2::2], strict=True)
    }


def texts(html):
    return [text.strip() for text in Page(html).texts if text.strip()]


def figures(text):
    """Titles of the figures to the texts in them."""
    found = re.findall(r'<figure role="img" aria-label="([^"]*)">(.*?)</figure>', text, re.DOTALL)
    return {title: texts(image) for title, image in found}


# -- the page ------------------------------------------------------------------------------------------------------


def full_run():
    return RunSummary(
        "debug/version_3",
        ["not evaluated: no evaluation items were given"],
        {},
        module="MADPOModule",
        models=["the random model `builtin:tiny`, 2 agents"],
        tiles=[("started", "2026-12-01 10:00 UTC"), ("total time", "2 min 5 s")],
        phases={"training": 60.0, "sampling": 30.0, "other": 10.0},
        options=[("Training", [("precision", "32-true"), ("rounds (`n`)", "``a `b` c`` of <4>")]), ("Reward", [])],
        changed="model:\n  beta: 0.1  # <b>\n",
        configuration="seed: 0\n",
    )


def test_the_head_says_what_was_run_and_how_long_it_took():
    page = render(full_run())
    said = sections(page)
    assert safe(page)
    assert said[""] == [
        "debug/version_3", "MADPOModule", "· the random model", "builtin:tiny", ", 2 agents",
        "started", "2026-12-01 10:00 UTC", "total time", "2 min 5 s", "not evaluated: no evaluation items were given",
    ]  # fmt: skip
    assert "<title>debug/version_3</title>" in page
    assert said["Time"] == [
        "spent on", "time", "share", "training", "1 min 0 s", "60 %", "sampling", "30.0 s", "30 %", "other", "10.0 s",
        "10 %",
    ]  # fmt: skip
    assert re.findall(r"width: ([\d.]+)%", page.partition("</style>")[2]) == ["60.00", "30.00", "10.00"]


def test_options_show_what_matters_and_fold_the_rest():
    page = render(full_run())
    shown, folded = page.partition("<h2>Options</h2>")[2].split("<details>", 1)
    assert texts(shown) == ["Training", "precision", "32-true", "rounds (", "n", ")", "a `b` c", "of <4>"]
    assert "<code>a `b` c</code> of &lt;4&gt;" in shown
    assert texts(folded.partition("</section>")[0]) == [
        "what was set, as a configuration", "model:\n  beta: 0.1  # <b>", "all options", "seed: 0",
    ]  # fmt: skip
    assert folded.count("</details>") == 2


def test_the_page_loads_nothing_and_has_two_schemes():
    page = render(full_run())
    assert not re.search(r"https?://(?!www\.w3\.org/)", page)
    assert "prefers-color-scheme: dark" in page
    assert 'name="viewport" content="width=device-width' in page
    light, dark = re.findall(r":root \{(.*?)\}", STYLE, re.DOTALL)
    for variable in PAGE_COLORS.values():
        assert f"{variable}:" in light
        assert f"{variable}:" in dark
    for color, variable in PAGE_COLORS.items():  # what a picture has outside of a page is what the page has in light
        assert f"{variable}: {color};" in light


def test_every_text_at_the_top_is_escaped():
    run = RunSummary(
        HOSTILE, [], {}, module=HOSTILE, models=[HOSTILE], tiles=[(HOSTILE, HOSTILE)], phases={HOSTILE: 1.0},
        options=[(HOSTILE, [(HOSTILE, HOSTILE)])], changed=HOSTILE, configuration=HOSTILE,
    )  # fmt: skip
    page = render(run)
    assert safe(page)
    assert "<img" not in page
    page.encode()


# -- numbers, curves, agents ---------------------------------------------------------------------------------------


def test_one_point_is_a_number_and_more_are_a_figure():
    curves = {
        "collect/reward_mean": curve(0.25),
        "collect/reward_standard_error": curve(0.125),
        "train/loss": curve(0.7, 0.6),
        "time/sampling": curve(3.0),
        "iter/current_preference_pairs": curve(61.0),
    }
    page = render(RunSummary("r", [], curves))
    assert texts(page.partition('<div class="tiles">')[2].partition("</section>")[0])[:4] == [
        "Collection: mean score of a round: current agents", "0.25 ± 0.12", "Pairs of a round: collected", "61",
    ]  # fmt: skip
    assert list(figures(page)) == ["MADPO loss"]
    assert "Time of a round" not in page  # the phases of a single round are those of the run


def test_a_figure_has_a_line_and_a_legend_entry_per_agent():
    curves = {f"train/margin/agent_{agent}": curve(1.0, 2.0) for agent in (0, 1, 10, 2)}
    curves |= {"train/grad_norm": curve(3.0, 4.0), "train/grad_norm/agent_0": curve(1.0, 2.0)}
    curves |= {"own/thing/agent_0": curve(1.0, 2.0), "own/thing/agent_1": curve(2.0, 1.0)}
    shown = figures(render(RunSummary("r", [], curves)))
    assert list(shown) == [
        "Joint margin of the pairs, by agent",
        "Gradient norm before clipping",
        "own/thing, by agent",
    ]
    margins, norms, own = shown.values()
    assert [text for text in margins if text.startswith("agent")] == ["agent 0", "agent 1", "agent 2", "agent 10"]
    assert [text for text in norms if text in ("all", "agent 0")] == ["all", "agent 0"]
    assert [text for text in own if text.startswith("agent")] == ["agent 0", "agent 1"]
    lines = curve_figure("t", {f"agent {agent}": curve(1.0, 2.0) for agent in range(4)}).axes[0].lines
    assert [(line.get_label(), list(line.get_ydata())) for line in lines] == [
        (f"agent {agent}", [1.0, 2.0]) for agent in range(4)
    ]


def test_two_quantities_of_a_panel_have_figures_per_agent_of_their_own():
    curves = {
        f"train/logps/{side}/agent_{agent}": curve(1.0, 2.0) for side in ("chosen", "rejected") for agent in (0, 1)
    }
    assert list(figures(render(RunSummary("r", [], curves)))) == [
        "Log-probability of pairs: chosen, by agent",
        "Log-probability of pairs: rejected, by agent",
    ]


def test_names_per_agent_and_of_errors():
    assert agent_names(["a/agent_x", "agent_1", "a/agent_1/b", "b/agent_1"]) == {"b": {1: "b/agent_1"}}
    assert error_name("collect/comparator_reward_mean") == "collect/comparator_reward_standard_error"
    assert is_drawn("collect/win_rate_standard_error")
    assert is_drawn("collect/response_length/agent_3")
    assert not is_drawn("collect/dropped_candidates")
    assert {error_name(name) for panel in PANELS for name in panel.names}.isdisjoint(
        name for panel in PANELS for name in panel.names
    )


def test_what_was_cut_is_counted_apart_from_what_is_measured():
    names = ("win_rate", "win_rate_standard_error", "response_length/agent_0", "dropped_candidates")
    said = sections(render(RunSummary("r", [], {f"collect/{name}": curve(0.5, 2.0) for name in names})))
    assert said["What was cut or dropped"] == ["what", "so far", "dropped candidates", "2"]


def test_cards_leave_out_single_points_and_what_says_nothing_of_learning():
    curves = {"train/loss": curve(1.0), "train/margin": curve(1.0, 2.0), "time/sampling": curve(1.0, 2.0)}
    assert [panel.title for panel, _ in learning_panels(curves)] == ["Joint margin of the pairs"]


def test_bands_are_one_standard_error_around_each_point():
    mean, error = Curve(), Curve()
    for step, (value, spread) in enumerate([(1.0, 0.5), (2.0, math.inf), (3.0, 0.25)]):
        mean.add(10 * step, value)
        error.add(10 * step, spread)  # an error that is not finite is none
    curves = {"eval/turn_1/reward_mean": mean, "eval/turn_1/reward_standard_error": error}
    ((_, lines),) = filled_panels(curves)
    low, high = lines["evaluation items"].band()
    assert (low[::2], high[::2]) == ([0.5, 2.75], [1.5, 3.25])
    assert math.isnan(low[1])
    assert math.isnan(high[1])
    (band,) = curve_figure("t", lines).axes[0].collections
    corners = {tuple(corner) for path in band.get_paths() for corner in path.vertices.tolist()}
    assert {(0.0, 0.5), (0.0, 1.5), (20.0, 2.75), (20.0, 3.25)} <= corners
    assert {step for step, _ in corners} == {0.0, 20.0}
    said = texts(render(RunSummary("r", [], curves)))
    assert "Bands are one standard error of the mean to each side." in said
    assert not curve_figure("t", {"a": mean}).axes[0].collections


def test_standard_errors_by_hand():
    assert standard_error([]) is None
    assert standard_error([2.0]) is None
    assert standard_error([1.0, 2.0, 4.0, 5.0]) == pytest.approx(((4 + 1 + 1 + 4) / 3 / 4) ** 0.5)


def test_smoothing_by_its_definition():
    values = [float(value) for value in (3, 1, 4, 1, 5, 9, 2, 6)]
    for place, value in enumerate(smoothed(values, 0.8)):
        weights = [0.8 ** (place - j) for j in range(place + 1)]
        expected = sum(w * x for w, x in zip(weights, values, strict=False)) / sum(weights)
        assert value == pytest.approx(expected, rel=1e-12)
    assert smoothed([2.0] * 5, 0.8) == pytest.approx([2.0] * 5)
    assert smoothed([], 0.8) == []


def test_a_long_curve_is_drawn_as_logged_and_smoothed():
    values = [float(place % 7) for place in range(60)]
    raw, smooth = curve_figure("t", {"a": curve(*values)}).axes[0].lines
    assert list(raw.get_ydata()) == values
    assert raw.get_alpha() == 0.3
    assert list(smooth.get_ydata()) == smoothed(values, 0.8)
    assert [line.get_label() for line in (raw, smooth)][1] == "a"
    said = " ".join(texts(render(RunSummary("r", [], {"train/loss": curve(*values)}))))
    assert "exponential moving average with weight 0.8 of the past" in said
    (short,) = curve_figure("t", {"a": curve(*values[:20])}).axes[0].lines
    assert list(short.get_ydata()) == values[:20]
    assert "moving average" not in render(RunSummary("r", [], {"train/loss": curve(*values[:20])}))


def test_totals_of_averaged_curves_are_exact():
    long = curve(*(float(value % 13) for value in range(3000)))
    assert long.stride > 1
    assert long.total == pytest.approx(sum(value % 13 for value in range(3000)))
    assert Curve.from_state(long.state_dict()) == long


def test_a_figure_takes_its_colors_from_the_page():
    drawn = svg(curve_figure("stroke: #222222", {"a": curve(1.0, 2.0), "b": curve(2.0, 1.0)}, "nats"), "salt")
    assert "var(--line-0, #1f6fb4)" in drawn
    assert "var(--line-1, #d9822b)" in drawn
    assert "fill: var(--ink, #222222)" in drawn
    assert "#ffffff" not in drawn  # transparent on a dark page
    assert (pixels(curve_figure("t", {"a": curve(1.0, 2.0)}))[0, 0] == 255).all()  # and white elsewhere


# -- what is measured of a collection ------------------------------------------------------------------------------


def test_win_rate_errors_and_lengths_of_a_collection_by_hand():
    first = Collection(actor_rewards=[1.0, 2.0], comparator_rewards=[0.0, 2.0], outcomes=[1.0, 0.5])
    first.response_tokens = [[2, 4], [1, 1]]
    second = Collection(actor_rewards=[0.0, 5.0], comparator_rewards=[3.0, 3.0], outcomes=[0.0, 1.0])
    second.response_tokens = [[6], [1]]
    both = Collection()
    both.extend(first)
    both.extend(second)
    found = collection_details(both)
    assert found["collect/win_rate"] == 2.5 / 4
    assert found["collect/tie_rate"] == 0.25
    deviations = [(x - 0.625) ** 2 for x in (1, 0.5, 0, 1)]
    assert found["collect/win_rate_standard_error"] == pytest.approx((sum(deviations) / 3 / 4) ** 0.5)
    assert found["collect/reward_standard_error"] == pytest.approx(((1 + 0 + 4 + 9) / 3 / 4) ** 0.5)
    assert found["collect/comparator_reward_standard_error"] == pytest.approx(((4 + 0 + 1 + 1) / 3 / 4) ** 0.5)
    assert (found["collect/response_length/agent_0"], found["collect/response_length/agent_1"]) == (4.0, 1.0)
    assert collection_details(Collection(actor_rewards=[1.0])) == {}
    assert [outcome(2, 1), outcome(1, 1), outcome(0, 1)] == [1.0, 0.5, 0.0]


def test_lengths_are_those_of_joint_responses():
    def said(*lengths):
        return {index: Response("x", [1] * length, True) for index, length in enumerate(lengths)}

    sample = TeamSample(0, ["p", "p"], [said(3, 5, 7), said(1, 2)])
    assert response_tokens(sample) == [[3, 5], [1, 2]]  # the second agent has no third response
    assert mean_lengths(response_tokens(sample)) == {"response_length/agent_0": 4.0, "response_length/agent_1": 1.5}
    assert response_tokens(TeamSample(0, ["p"], [said(0)], joint_tokens=9)) == []
    assert mean_lengths([]) == {}


# -- facts of a run ------------------------------------------------------------------------------------------------


def test_phases_add_up_to_the_whole_run():
    curves = {"time/sampling": curve(1.0, 2.0), "time/training": curve(10.0, 5.0), "time/round": curve(99.0)}
    found = phases(curves, {"sampling": 0.5, "saving": 0.25}, 20.0)
    assert found == {"training": 15.0, "sampling": 3.5, "saving": 0.25, "other": 1.25}
    assert list(found) == ["training", "sampling", "saving", "other"]
    assert phases({}, {}, 3.0) == {"other": 3.0}


def test_seconds_that_are_looked_at_are_still_there():
    take_seconds()
    with spending("saving"):
        sum(range(10000))
    seen = pending_seconds()
    assert seen["saving"] > 0
    assert take_seconds()["saving"] == seen["saving"]


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0.04, "0.0 s"), (59.9, "59.9 s"), (60, "1 min 0 s"), (3599.6, "1 h 0 min"), (7380, "2 h 3 min")],
)
def test_durations(seconds, said):
    assert duration(seconds) == said


def test_models_and_options_of_a_run(tmp_path):
    module, data = make_module(make_team(), rounds=2), make_data(eval_items=None)
    trainer = make_trainer(tmp_path)
    trainer.datamodule = data
    assert models(module) == ["the random model `builtin:tiny`, which is for tests, 2 agents"]
    module.load()
    trainer.strategy.connect(module)
    module.trainer = trainer
    found = {heading: dict(facts) for heading, facts in options(trainer, module, data, 4)}
    assert found["Training"]["module"] == "`MADPOModule`"
    assert found["Training"]["rounds"] == "0 of 2"
    assert found["Training"]["precision"] == "32-true"
    assert found["Task items and pairs"]["compared against"] == "`CurrentComparator()`"
    assert found["Reward"]["task reward"] == "`training_runs:text_reward`"
    assert found["Versions"]["torch"]
    changed, complete = configuration(trainer)
    assert changed == ""  # known from the command line only
    assert yaml.safe_load(complete)["team"]["models"] == "builtin:tiny"


def test_what_was_set_on_the_command_line_is_apart_from_defaults():
    parser = LightningArgumentParser()
    parser.add_lightning_class_args(MADPOModule, "model", subclass_mode=True, required=False)
    parser.add_argument("--seed", type=int, default=0)
    team = {"class_path": "AgentTeam", "init_args": {"models": "builtin:tiny", "num_agents": 3}}
    given = parser.parse_object(
        {"model": {"class_path": "MADPOModule", "init_args": {"team": team, "dpo_beta": 0.5, "weight_decay": 0.01}}}
    )
    trainer = SimpleNamespace(callbacks=[ConfigSaver(parser, given)])
    changed, complete = (yaml.safe_load(text) for text in configuration(trainer))
    arguments = changed["model"]["init_args"]
    assert arguments["dpo_beta"] == 0.5
    assert arguments["team"]["init_args"]["num_agents"] == 3
    assert "weight_decay" not in arguments
    assert "seed" not in changed
    assert complete["model"]["init_args"]["weight_decay"] == 0.01
    assert complete["seed"] == 0


# -- tables of texts -----------------------------------------------------------------------------------------------


WORDS = "The quick brown fox jumps over the lazy dog and an uncommonlylongword_that_goes_on_for_ever. " * 12
CODE = "def f(x):\n    return x | 1  # *bold* <b>no</b> `tick` [a](http://evil/) ![i](http://evil/) \\* &amp; ~~x~~"


def samples(*completions, prompts=("Tell a story.", "Tell another one.")):
    return [
        JointSample(0, "winner: current agents", list(prompts), list(completions), 1.0),
        JointSample(0, "loser: comparator", list(prompts), list(completions), None),
    ]


def test_tables_show_prompts():
    columns, rows = table_of(samples("a", "b"))
    assert columns == ["item", "side", "reward", "prompt", "agent 0", "agent 1"]
    prompt = "agent 0: Tell a story.\nagent 1: Tell another one."
    assert rows[0] == [0, "winner: current agents", 1.0, prompt, "a", "b"]
    assert table_of(samples("a", "b", prompts=["same", "same"]))[1][1][3] == "same"
    assert table_of([]) == (["item", "reward", "prompt"], [])


def test_texts_are_wrapped_between_words_and_long_ones_folded():
    head, first, _ = wrapped_cells(*table_of(samples(WORDS, "short")))
    assert head == [["item"], ["side"], ["reward"], ["prompt"], ["agent 0"], ["agent 1"]]
    item, side, reward, prompt, long, short = first
    assert (item, side, reward, short) == (["0"], ["winner:", "current agents"], ["1.000"], ["short"])
    assert len(long) == MOST_LINES + 1
    hidden = re.fullmatch(r"… (\d+) lines …", long[MOST_LINES // 2])
    width = (TABLE_WIDTH - len("item") - SHORT_WIDTH - len("reward") - len("agent 1")) // 2
    assert max(map(len, prompt + long)) <= width
    words = set(WORDS.split())
    kept = [line for line in long if line != hidden[0]]
    whole = [line for line in kept if "ever" not in line and "uncommonly" not in line]
    assert whole
    assert all(word in words for line in whole for word in line.split())  # no word is cut that fits a line
    assert kept[0] == "The quick brown fox jumps over"
    assert int(hidden[1]) > 10


def test_lines_and_indentation_of_code_are_kept():
    _, first, _ = wrapped_cells(*table_of(samples("if x:\n\n    return 1\n", WORDS)))
    assert first[4] == ["if x:", "", "    return 1"]
    assert wrapped_cells(["x"], [["\n"], [""], [" "], ["\t"]])[1:] == [[[""]]] * 4


class Rendered(HTMLParser):
    """Tags of a page, and the texts of its cells with their lines."""

    def __init__(self, html):
        super().__init__()
        self.tags, self.cells = set(), []
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        if tag in ("td", "th"):
            self.cells.append("")
        if tag == "br":
            self.cells[-1] += "\n"

    def handle_data(self, data):
        if self.cells:
            self.cells[-1] += data


def test_tensorboard_shows_a_table_as_it_is_written():
    text = wrapped_table(*table_of(samples(CODE, HOSTILE.replace("\n", " "), prompts=["p", "p"])))
    shown = Rendered(markdown_to_safe_html(text))
    assert shown.tags == {"table", "thead", "tbody", "tr", "th", "td", "pre", "br"}
    cells = [cell.strip() for cell in shown.cells]
    assert len(cells) == 3 * 6
    assert cells[:6] == ["item", "side", "reward", "prompt", "agent 0", "agent 1"]
    assert cells[7] == "winner:\ncurrent agents"
    assert cells[14] == "-"
    narrow = wrapped_cells(*table_of(samples("a", "b\nc", prompts=["p", "p"])))  # there is room for all of it
    assert narrow[1] == [["0"], ["winner: current agents"], ["1.000"], ["p"], ["a"], ["b", "c"]]
    expected = [line.split() for line in CODE.splitlines()]
    assert " ".join(cells[10].split()) == " ".join(" ".join(line) for line in expected)
    assert "<script>alert('x')</script>" in cells[11].replace("\n", "")


def test_no_character_of_a_text_is_markup():
    printable = "".join(chr(code) for code in range(33, 127))
    for text in (*printable, "**a**", "__a__", "<br>", "http://a.b", "# a", "1. a", "- a", "> a", "```", "&lt;", "\\|"):
        html = Markdown(extensions=["tables", "fenced_code"]).convert(wrapped_table(["x"], [[text]]))
        assert [cell.strip() for cell in Rendered(html).cells] == ["x", text], text


def test_the_style_lets_no_page_grow_wider_than_a_phone():
    for rule in (".wide { overflow-x: auto; }", "overflow-wrap: anywhere", "@media (max-width: 600px)"):
        assert rule in STYLE
    assert all(int(width) <= 100 for width in re.findall(r"width: (\d+)%", STYLE))
    assert not re.search(r"minmax\(\d{3}px", STYLE)  # a column may be as narrow as the screen
