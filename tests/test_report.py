"""A run's report by hand: bounded curves, distributions, tables, and a page that escapes whatever a model writes."""

import math
import pickle
import random
import re
import sys
from functools import partial
from html.parser import HTMLParser
from statistics import fmean

import pytest

from pbrl_lightning.batches import PreferencePair
from pbrl_lightning.curves import CAPACITY, Curve, CurveLogger
from pbrl_lightning.distributions import bin_edges, binned, reliability, reward_distribution, without_values
from pbrl_lightning.figures import calibration_figure, curve_figure, histogram_figure, pixels, reward_figure
from pbrl_lightning.preferences.collector import RawRewards
from pbrl_lightning.preferences.oracle import Oracle
from pbrl_lightning.report import RunSummary, render
from pbrl_lightning.samples import JointSample, markdown_table, pair_samples
from training_runs import text_reward

pytestmark = pytest.mark.figures

HOSTILE = "</pre><script>alert('x')</script><img src=\"http://evil/\" onerror=a()> & $\\frac$ \x00\x1b \ud800 | \n_"


class ShownReward:
    """``text_reward`` with a range, narrower than what it gives."""

    reward_range = (1.0, 9.0)

    def __call__(self, *completions):
        return text_reward(*completions)


# -- curves --------------------------------------------------------------------------------------------------------


def test_a_short_curve_is_kept_as_it_is():
    curve = Curve()
    for step, value in [(0, 1.0), (5, math.nan), (5, 2.0), (7, math.inf), (9, -1.0)]:
        curve.add(step, value)
    assert (list(curve.steps), list(curve.values), curve.last) == ([0, 5, 9], [1.0, 2.0, -1.0], -1.0)


def test_a_long_curve_is_bounded_and_each_point_is_the_mean_of_its_neighbours():
    draw, curve = random.Random(0), Curve()
    values = [draw.gauss(0, 1) for _ in range(9 * CAPACITY + 5)]
    for step, value in enumerate(values):
        curve.add(step, value)
        assert len(curve) <= CAPACITY
    assert (curve.stride, curve.last) == (16, values[-1])
    for place, (step, mean, count) in enumerate(zip(curve.steps, curve.values, curve.counts, strict=True)):
        mine = values[place * 16 : (place + 1) * 16]
        assert (count, step) == (len(mine), place * 16 + len(mine) - 1)
        assert mean == pytest.approx(fmean(mine), abs=1e-12)
    assert curve.steps[-1] == len(values) - 1


def test_curves_go_on_from_their_state():
    whole, first, second = CurveLogger(), CurveLogger(), CurveLogger()
    for step in range(700):
        first.log_metrics({"a": step**0.5}, step)
        whole.log_metrics({"a": step**0.5}, step)
    second.load_state_dict(first.state_dict())
    for step in range(700, 1500):
        second.log_metrics({"a": step**0.5, "b": 1.0}, step)
        whole.log_metrics({"a": step**0.5, "b": 1.0}, step)
    assert second.curves == whole.curves
    assert len(pickle.dumps(whole.state_dict())) < 40 * 2 * CAPACITY


# -- distributions -------------------------------------------------------------------------------------------------


def test_bins_by_hand():
    edges = bin_edges([], (0.0, 16.0))
    assert edges == [float(edge) for edge in range(17)]
    found = binned([0.0, 0.5, 1.0, 15.5, 16.0, -0.1, 16.1, 40.0], edges)
    assert found["counts"] == [2, 1, *[0] * 12, 0, 2]
    assert (found["count"], found["below"], found["above"]) == (8, 1, 2)
    assert found["mean"] == pytest.approx(89 / 8)
    assert binned([], edges) | {"counts": 0} == {
        "count": 0, "mean": None, "counts": 0, "below": 0, "above": 0, "values": []
    }  # fmt: skip


def test_without_a_range_the_bins_span_the_scores():
    assert (bin_edges([2.0, -1.0], None)[0], bin_edges([2.0, -1.0], None)[-1]) == (-1.0, 2.0)
    assert binned([3.0, 3.0], bin_edges([3.0, 3.0], None))["counts"][8] == 2
    assert len(bin_edges([], None)) == 17


def test_reliability_by_a_loop():
    draw = random.Random(1)
    margins = [draw.gauss(0.5, 2) for _ in range(300)]
    found = reliability(margins)
    rows = [(1 / (1 + math.exp(-abs(margin))), margin > 0) for margin in margins]
    error = 0.0
    for place in range(10):
        low = 0.5 + 0.05 * place
        mine = [row for row in rows if low <= row[0] < low + 0.05]
        assert found.counts[place] == len(mine)
        assert found.confidence[place] == pytest.approx(fmean(sure for sure, _ in mine))
        assert found.accuracy[place] == pytest.approx(fmean(right for _, right in mine))
        error += abs(sum(right - sure for sure, right in mine)) / 300
    assert found.error == pytest.approx(error)
    assert math.isnan(reliability([]).error)


def ranged(*completions):
    return [0.0 for _ in completions[0]]


def test_where_a_reward_says_its_range(monkeypatch):
    assert Oracle(ShownReward()).reward_range() == (1.0, 9.0)
    assert Oracle(partial(ShownReward())).reward_range() == (1.0, 9.0)
    assert Oracle(ranged).reward_range() is None
    monkeypatch.setattr(sys.modules[__name__], "reward_range", (0, 2), raising=False)
    assert Oracle(ranged).reward_range() == (0.0, 2.0)  # beside it
    assert Oracle("pbrl_lightning.tasks.coordination:same_last_letter").reward_range() == (0.0, 1.0)
    for wrong in ((1.0,), (2.0, 1.0), ("a", "b"), (0.0, math.inf), 3.0):
        monkeypatch.setattr(ranged, "reward_range", wrong, raising=False)
        with pytest.raises(ValueError, match="`reward_range` of `ranged` must"):
            Oracle(ranged).reward_range()


# -- samples -------------------------------------------------------------------------------------------------------


def pair(prompt, winner, loser, raw=(), target=None):
    return PreferencePair([prompt], [winner], [loser], 2.0, 1.0, 1.5, list(raw), target, None)


def test_the_first_pair_of_each_item():
    pairs = [pair("p", "a", "b"), pair("p", "c", "d"), pair("q", "e", "f", [7.0, 5.0], 5.0)]
    pairs += [pair("r", "g", "h", [7.0, 5.0], 7.0), pair("s", "i", "j")]
    found = pair_samples(pairs, 3)
    assert [(sample.item, sample.side, sample.completions, sample.reward) for sample in found] == [
        (0, "winner", ["a"], 2.0),
        (0, "loser", ["b"], 1.0),
        (1, "winner: comparator", ["e"], 2.0),
        (1, "loser: current agents", ["f"], 1.0),
        (2, "winner: current agents", ["g"], 2.0),
        (2, "loser: comparator", ["h"], 1.0),
    ]


def test_a_markdown_cell_stays_one_cell():
    line = markdown_table(["a", "b"], [["x | y\nz", None]]).splitlines()[-1]
    assert line == "| x \\| y z | - |"


# -- the report ----------------------------------------------------------------------------------------------------


class Page(HTMLParser):
    """Tags, attributes and text of a page."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.attributes, self.texts = [], [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data):
        self.texts.append(data)


def safe(text):
    """True if nothing in the page loads or runs anything."""
    page = Page(text)
    links = [value for name, value in page.attributes if name in ("src", "href", "xlink:href", "data", "action")]
    handlers = [name for name, _ in page.attributes if name.startswith("on")]
    forbidden = {"script", "img", "iframe", "object", "embed", "link", "base", "form", "image", "foreignobject"}
    return all(link.startswith("#") for link in links) and not handlers and not forbidden & set(page.tags)


def curve(*values):
    made = Curve()
    for step, value in enumerate(values):
        made.add(step, value)
    return made


def test_the_report_escapes_whatever_a_model_writes():
    sample = JointSample(0, HOSTILE, [HOSTILE], [HOSTILE, "x" * 10000], None)
    rewards = RawRewards([1.0, 2.0], [], [2.0])
    run = RunSummary(
        HOSTILE,
        [HOSTILE],
        {"eval/" + HOSTILE: curve(1.0, 2.0), "train/loss": curve(3.0), "collect/<b>": curve(1.0, 4.0)},
        [(HOSTILE, "b"), (HOSTILE, "c")],
        [without_values(reward_distribution(1, rewards, None))],
        [sample],
        [sample],
        {1: [sample, sample]},
    )
    text = render(run)
    assert safe(text)
    said = "".join(Page(text).texts)
    assert re.sub(r"[\x00\x1b\ud800]", "\ufffd", HOSTILE) in said
    assert "(4000 more characters)" in said
    assert "\x00" not in text
    text.encode()  # no half of a character is left
    assert "default-src 'none'" in text


def test_a_report_of_nothing_is_a_page():
    text = render(RunSummary("MARLModule", [], {}))
    assert safe(text)
    assert "<h2>" not in text


def test_before_and_after_are_paired_by_item():
    before = [JointSample(item, "", ["p"], [f"old {item}"], 1.0) for item in (0, 1)]
    after = [JointSample(1, "", ["p"], ["new 1"], 2.0)]
    said = [text.strip() for text in Page(render(RunSummary("M", [], {}, before=before, after=after))).texts]
    kept = [text for text in said if text.startswith(("item", "old", "new", "before", "after"))]
    assert kept == ["item 0", "before · 1.000", "old 0", "item 1", "before · 1.000", "old 1", "after · 2.000", "new 1"]


def test_figures_of_what_there_is_little_of():
    empty = reward_distribution(1, RawRewards(), None)
    one = reward_distribution(1, RawRewards([2.0], [9.0], [2.0], [9.0]), (0.0, 3.0))
    for figure in (
        reward_figure(empty),
        reward_figure(one),
        histogram_figure([1.0], "t", "l"),
        calibration_figure([0.0], "t"),
        curve_figure("$x", {"_a": curve(1.0), "<b>": curve()}),
    ):
        drawn = pixels(figure)
        assert drawn.shape[2] == 3
        assert drawn.std() > 1


def test_no_figure_is_left_to_pyplot():
    assert "matplotlib.pyplot" not in sys.modules or not sys.modules["matplotlib.pyplot"].get_fignums()
