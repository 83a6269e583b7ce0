"""How a step is computed changes no run: accumulation, split, checkpointing, token budget and evaluation; and bfloat16.

Whole trajectories are compared. In float64 a variant is the base run; in float32 what is left between them is rounding,
which is small and has no direction. Planted faults show that these checks see steps that are a ten-thousandth too long.
"""

import math

import pytest
import torch
from lightning.pytorch.callbacks import Callback

from pbrl_lightning import MADPOModule, SamplingConfig
from pbrl_lightning.callbacks import JointEvaluation
from process_runs import GLOBAL_BATCH, build
from training_runs import SAMPLING, make_trainer, round_files

SLOW = pytest.mark.slow
LIMIT = 1e-10  # in float64; the largest gap measured is 1e-12
SMALL = 1e-2  # of float32's residual, relative to the whole way; measured 1e-3
# A mean below this, relative to the way, is no direction, whatever its standard error: a tenth of the planted fault.
# The errors of one run hang together, since each step starts from weights that are apart already. Over twelve seeds
# their means have either sign and stay below 1e-6, at up to 5 standard errors; which seed, the kind of CPU decides.
RESOLUTION = 1e-5
CRITICS = ["maac", "iac"]
LONGER = ["madpo_iter", "marlhf", "marlhf_iter", "magrpo", *CRITICS]
RUNS = ["madpo", *(pytest.param(run, marks=SLOW) for run in LONGER)]
VARIANTS = {
    "halved": {"accumulate": 2},
    # Six responses fit into the budget, so an item's are torn apart.
    "at once": {"accumulate": 2, "parts": True, "checkpointing": True, "budget": 24},
}


class Trajectory(Callback):
    """Every trained tensor before the first and after every optimizer step, and the loss of every step."""

    def __init__(self):
        self.losses, self.files, self._seen = [0.0], {}, []

    def on_train_start(self, trainer, pl_module):
        self._moving = {name: value for name, value in pl_module.named_parameters() if value.requires_grad}
        self._keep()

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.losses[-1] += outputs["loss"].item()  # Lightning has divided it by the batches of a step
        if trainer.global_step == len(self._seen):
            self._keep()
            self.losses.append(0.0)

    def on_train_end(self, trainer, pl_module):
        self.losses.pop()  # of the step that did not come
        self.weights = {name: torch.stack([step[name] for step in self._seen]) for name in self._moving}
        self._seen, self._moving = [], {}

    def _keep(self):
        self._seen.append({name: value.detach().to(torch.float64, copy=True) for name, value in self._moving.items()})


def fit(root, run, dtype, accumulate=1, parts=False, budget=None, evaluated=False, longer=1.0, **options):
    """One run: ``parts`` splits rollouts only when they are learned from, ``longer`` stretches the agents' steps."""
    module, data = build(run, 1, root, dtype=dtype, accumulate=accumulate, **options)
    if parts or run in CRITICS:  # which normalise over a rollout, so that two halves are not one
        data.rollout_batch_size, data.train_batch_size = GLOBAL_BATCH, GLOBAL_BATCH // accumulate
    if budget is not None:
        data.sampling = SamplingConfig(**{**vars(SAMPLING), "token_budget": budget})
    if not evaluated:
        data.evaluator = None
    module.learning_rate *= longer
    trajectory = Trajectory()
    callbacks = [trajectory, JointEvaluation(1)] if evaluated else [trajectory]
    trainer = make_trainer(root, callbacks, max_epochs=-1, accumulate_grad_batches=accumulate)
    trainer.fit(module, data)
    trajectory.files = round_files(root / "replay")
    return trajectory


def largest_gap(base, other):
    assert base.files == other.files
    assert base.weights.keys() == other.weights.keys()
    assert len(base.losses) == len(other.losses) >= 20
    return max((other.weights[name] - base.weights[name]).abs().max().item() for name in base.weights)


def relative_size(base, other):
    """The largest distance between both trajectories, relative to the way from the start to the end."""
    apart = sum((other.weights[name] - way).flatten(1).square().sum(1) for name, way in base.weights.items())
    length = sum((way[-1] - way[0]).square().sum() for way in base.weights.values())
    return (apart.max() / length).sqrt().item()


def surplus(base, other):
    """By how much ``other`` goes further along ``base``'s steps, of each tensor; 0.01 where its steps are 1 % longer.

    Not the mean residual: weights go up as often as down, so that of longer steps is zero, too.
    """
    found = []
    for name, way in base.weights.items():
        steps, residual = way.diff(dim=0), (other.weights[name] - way).diff(dim=0)
        found.append((residual * steps).sum() / steps.square().sum())
    return torch.stack(found)


def standard_errors(samples):
    """How many standard errors the mean is away from 0; samples that go with their neighbours count as fewer."""
    centred = samples - samples.mean()
    variance = centred.square().mean()
    if not variance:
        return 0.0 if not samples.any() else math.inf
    along = (centred[1:] * centred[:-1]).mean().div(variance).clamp(0, 0.99)
    count = len(samples) * (1 - along) / (1 + along)
    return (samples.mean().abs() / (variance / count).sqrt()).item()


def assert_no_direction(samples, scale):
    """The samples' mean is zero, as far as their scatter and the resolution relative to ``scale`` let see."""
    assert samples.mean().abs() < RESOLUTION * scale or standard_errors(samples) < 4


def assert_rounding(base, other):
    """Small, and with a mean of zero along the way and in the losses."""
    assert largest_gap(base, other) > 0  # else there is nothing to look at
    assert relative_size(base, other) < SMALL
    assert_no_direction(surplus(base, other), 1)
    losses, others = torch.tensor(base.losses).double(), torch.tensor(other.losses).double()
    assert_no_direction(others - losses, losses.max() - losses.min())


@pytest.fixture(scope="module", params=RUNS)
def exact(request, tmp_path_factory):
    """A run in float64 whose steps are computed in one piece, without evaluation."""
    return request.param, fit(tmp_path_factory.mktemp("exact"), request.param, "float64")


@pytest.fixture(scope="module", params=RUNS)
def rounded(request, tmp_path_factory):
    """The same in float32."""
    return request.param, fit(tmp_path_factory.mktemp("rounded"), request.param, "float32")


@pytest.mark.parametrize("variant", VARIANTS)
def test_how_a_step_is_computed_changes_no_run(tmp_path, exact, variant):
    run, base = exact
    assert largest_gap(base, fit(tmp_path, run, "float64", **VARIANTS[variant])) < LIMIT


def test_evaluation_changes_no_bit(tmp_path, exact):
    run, base = exact
    other = fit(tmp_path, run, "float64", evaluated=True)
    assert largest_gap(base, other) == 0
    assert other.losses == base.losses


def test_rounding_has_no_direction(tmp_path, rounded):
    run, base = rounded
    assert_rounding(base, fit(tmp_path, run, "float32", accumulate=2))


def test_a_shift_above_the_resolution_is_a_direction():
    scatter = torch.tensor([1.0, -1.0] * 12).double() * 1e-6
    assert_no_direction(scatter, 1)
    assert_no_direction(scatter + RESOLUTION / 2, 1)  # 12 standard errors, of nothing that could be seen
    assert standard_errors(scatter + RESOLUTION / 2) > 4
    with pytest.raises(AssertionError):
        assert_no_direction(scatter + 2 * RESOLUTION, 1)
    with pytest.raises(AssertionError):
        assert_no_direction(scatter + RESOLUTION / 2, 0.1)


@pytest.mark.parametrize("run", ["madpo", pytest.param("magrpo", marks=SLOW)])
def test_steps_that_are_a_ten_thousandth_longer_are_seen_as_a_direction(tmp_path, run):
    base, other = (fit(tmp_path / str(longer), run, "float32", longer=longer) for longer in (1.0, 1.0001))
    assert relative_size(base, other) < SMALL  # this alone would let them pass
    assert surplus(base, other).mean().item() == pytest.approx(1e-4, rel=0.2)
    assert standard_errors(surplus(base, other)) > 4
    with pytest.raises(AssertionError):
        assert_rounding(base, other)


def test_accumulation_as_a_mean_of_means_is_seen(tmp_path, monkeypatch):
    base = fit(tmp_path / "base", "madpo", "float32")
    right = MADPOModule.step

    def wrong(module, batch, where):
        loss, metrics = right(module, batch, where)
        return loss / (batch.loss_scale * len(batch.weights)), metrics  # a tail of one batch counts as half a step

    monkeypatch.setattr(MADPOModule, "step", wrong)
    other = fit(tmp_path / "halved", "madpo", "float32", accumulate=2)
    assert relative_size(base, other) > SMALL
    with pytest.raises(AssertionError):
        assert_rounding(base, other)


@SLOW
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
@pytest.mark.parametrize(("run", "epochs"), [("madpo", 10), ("marlhf", 24)])
def test_fifty_steps_in_bfloat16(tmp_path, run, epochs, precision, lora):
    module, data = build(run, 1, tmp_path, dtype="float32", lora=lora)
    module.num_train_epochs = epochs
    trajectory = Trajectory()
    trainer = make_trainer(tmp_path, [trajectory], max_epochs=-1, precision=precision)
    trainer.fit(module, data)
    assert trainer.global_step == len(trajectory.losses) >= 50
    assert all(map(math.isfinite, trajectory.losses))
    narrow = torch.bfloat16 if precision == "bf16-true" else torch.float32
    for name, value in module.named_parameters():
        precise = "lora_" in name or name.endswith(".head.weight")
        assert value.dtype == (torch.float32 if precise else narrow), name
    for name, way in trajectory.weights.items():
        assert way.isfinite().all(), name
        moved = (way[-1] - way[0]).norm() / way[0].norm()
        if "norm" not in name:
            assert moved > 0.01, name
        elif narrow == torch.float32:  # a norm's weights are 1, where bfloat16 knows no step as short as ours
            assert moved > 0, name
    if run == "madpo":
        assert sum(trajectory.losses[-6:]) < sum(trajectory.losses[:6])  # the last epoch and the first
