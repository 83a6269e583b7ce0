"""PreferenceDataModule: collection and replay at the epoch boundary."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any, Literal

import lightning as L
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from typing_extensions import override

from pbrl_lightning.agents.sampling import SamplingConfig
from pbrl_lightning.batches import EvaluationBatch, PairTokens, PreferencePair, TaskItem
from pbrl_lightning.comparators.base import Comparator
from pbrl_lightning.data_items import load_items, source_names
from pbrl_lightning.data_options import validate_items, validate_options, validate_run
from pbrl_lightning.early_loaders import (
    PlannedLoader,
    TrainingStart,
    batches_of_pairs,
    mean_length,
    most_pairs_of_item,
)
from pbrl_lightning.evaluation import EvaluationLoader, Evaluator
from pbrl_lightning.generation import IndexLoader
from pbrl_lightning.modules.base import LearnerModule, TeamModule
from pbrl_lightning.monitoring import validates_pairs
from pbrl_lightning.pair_source import PairSource, held_out_split, warn_of_shared_items
from pbrl_lightning.preferences.collector import Collection, Collector
from pbrl_lightning.preferences.fingerprint import fingerprint
from pbrl_lightning.preferences.oracle import Oracle
from pbrl_lightning.preferences.pair_sources import pair_sources, read_sources
from pbrl_lightning.preferences.pair_tokens import PairLoader, pairs_from_state, pairs_to_state
from pbrl_lightning.preferences.replay import CurrentReplay, ReplayBuffer
from pbrl_lightning.preferences.scoring import PreferenceJudge
from pbrl_lightning.preferences.selection import PairSelection
from pbrl_lightning.randomness import run_seed
from pbrl_lightning.reporting.empty_rounds import why_no_pairs
from pbrl_lightning.reporting.log_interval import LogInterval
from pbrl_lightning.rollouts import RolloutLoader
from pbrl_lightning.rounds import (
    RoundRecord,
    RunProgress,
    batches_per_update,
    completed_epochs,
    log_round,
    log_to,
    notify,
)
from pbrl_lightning.run_directory import begin_run, continue_run, set_rows_aside
from pbrl_lightning.schedule import Position, RoundSchedule
from pbrl_lightning.utils.errors import ConfigurationError, OptionTypeError, RunError
from pbrl_lightning.utils.options import record_options


class PreferenceDataModule(L.LightningDataModule):
    """Task items and a reward in, batches of preference pairs and of rollouts out.

    At the first epoch of each round it samples joint responses of the module's team, scores them, writes the pairs
    to a round file and lets replay choose the training pairs. In the epochs of a policy phase it samples rollouts. The
    run is iterative if a comparator is given.

    Args:
        items: Task items: a list of dicts, a file, a data set of the ``datasets`` library, or a callable (also by
            import path); see :func:`pbrl_lightning.data_items.load_items`.
        reward_func: Scores joint responses: ``reward_func(*completions, prompts=…, batch_items=…)`` returns one number
            per joint response; ``completions`` are ``N`` lists of ``B`` texts. Also an import path, or async.
        reward_processor: Applied to each score (scale, shift, clip …) before it orders pairs.
        eval_items: Held-out task items; without them there is no evaluation.
        eval_metrics: The user's own metrics, called like the reward; returns a dict of numbers.
        comparator: Who gives the other side of each comparison; makes the run iterative.
        judge: Decides comparisons in the place of the reward's scores; a candidate then scores the share of its
            comparisons that it wins. ``reward_func`` still evaluates.
        replay: Which stored pairs a round trains on.
        num_candidates: Joint responses per item; default 80, iterative 20.
        pairs_per_sample: Most pairs kept per item, null for all; default 16, iterative 4.
        pair_selection: ``reward_gap``, ``random``, ``all`` or (iterative) ``comparator_reward``; default the first,
            iterative the last.
        sampling: How responses are sampled.
        batch_size: Pairs per batch and process; default 2, for a reward model 1.
        rollout_batch_size: Task items per rollout and process.
        train_batch_size: Task items per policy update, batch and process; default the whole rollout.
        pairs: Pairs to train on instead of collecting: a file or several (round files, ``.jsonl``, ``.jsonl.gz``,
            ``.parquet`` …), ``datasets:NAME``, a ``datasets.Dataset``, or a list of dicts
            (:func:`pbrl_lightning.preferences.pair_sources.read_pairs`).
        eval_pairs: Held-out pairs of the same kinds: a MADPOModule or JointRewardModule measures its loss, accuracy and
            margin on them after each epoch.
        val_fraction: Share of the task items in ``pairs`` that is held out for that instead; default 0.1 for a
            JointRewardModule, 0 for a MADPOModule. With ``eval_pairs`` nothing else is held out.
        preference_scoring_reward: Who scores new comparisons: ``task``, or in iterative MARLHF ``reward_model``, the
            last one fitted (the task reward until there is one).
        replay_dir: Where round files go; default ``replay`` in the run's directory.
        seed: The run's seed: every draw is a function of it. Default: that of ``lightning.seed_everything`` if it was
            called, else 0.
        max_concurrency: Most calls of an async reward or a judge at once, per process.
        num_turns: Only 1 is supported.
        joint_mode: Only ``aligned`` is supported.

    Raises:
        ConfigurationError: If options do not fit together; all problems are named at once.
    """

    def __init__(
        self,
        items: Any = None,
        reward_func: str | Callable[..., Any] | None = None,
        *,
        reward_processor: str | Callable[[float], float] | None = None,
        eval_items: Any = None,
        eval_metrics: Callable[..., dict[str, float]] | None = None,
        comparator: Comparator | None = None,
        judge: PreferenceJudge | None = None,
        replay: ReplayBuffer | None = None,
        num_candidates: int | None = None,
        pairs_per_sample: int | Literal["default"] | None = "default",
        pair_selection: PairSelection | None = None,
        sampling: SamplingConfig | None = None,
        batch_size: int | None = None,
        rollout_batch_size: int = 2,
        train_batch_size: int | None = None,
        pairs: Any = None,
        eval_pairs: Any = None,
        val_fraction: float | None = None,
        preference_scoring_reward: Literal["task", "reward_model"] = "task",
        replay_dir: str | None = None,
        seed: int | None = None,
        max_concurrency: int = 8,
        num_turns: int = 1,
        joint_mode: str = "aligned",
    ) -> None:
        seed = run_seed(seed)  # before it is recorded among the options
        record_options(self, locals())
        super().__init__()
        self.comparator = comparator
        self.judge, self._judge_identity = judge, fingerprint(judge)
        self.max_concurrency = max_concurrency
        self.replay = replay or CurrentReplay()
        self.num_candidates = num_candidates or (80 if comparator is None else 20)
        self.pair_selection: PairSelection = pair_selection or (
            "reward_gap" if comparator is None else "comparator_reward"
        )
        if pairs_per_sample == "default":
            pairs_per_sample = None if self.pair_selection == "all" else 16 if comparator is None else 4
        self.pairs_per_sample = pairs_per_sample
        self.sampling = sampling or SamplingConfig()
        self.batch_size = batch_size
        self.rollout_batch_size = rollout_batch_size
        self.train_batch_size = train_batch_size
        self.given_pairs = None if pairs is None else pair_sources(pairs, "pairs")
        self.given_eval_pairs = None if eval_pairs is None else pair_sources(eval_pairs, "eval_pairs")
        self.val_fraction = val_fraction
        self.preference_scoring_reward = preference_scoring_reward
        self.seed = seed
        self.sources = source_names(items=items, eval_items=eval_items, pairs=pairs, eval_pairs=eval_pairs)
        validate_options(
            self,
            reward_func=reward_func,
            eval_items=eval_items,
            replay=replay,
            num_candidates=num_candidates,
            num_turns=num_turns,
            joint_mode=joint_mode,
        )
        self.items = load_items(items, "items") if items is not None else []
        self.oracle = None
        if reward_func is not None:
            self.oracle = Oracle(reward_func, reward_processor, max_concurrency=max_concurrency)
        self.evaluator: Evaluator | None = None
        if eval_items is not None and reward_func is not None:
            held_out = load_items(eval_items, "eval_items")
            # An oracle of its own: what evaluation drops is not counted as dropped candidates.
            oracle = Oracle(reward_func, reward_processor, max_concurrency=max_concurrency)
            self.evaluator = Evaluator(held_out, oracle, self.sampling, seed, eval_metrics)
        self._replay_dir = replay_dir
        self._limit_val_batches: int | float | None = None
        self._log_interval = LogInterval()
        self.start_afresh()

    def start_afresh(self) -> None:
        """The state of a run before its first round; a resumed run's is loaded over it."""
        self.pair_source = PairSource(self.replay, self._replay_dir)
        self._progress = RunProgress()
        self.training_pairs: list[PreferencePair] = []
        self._tokens: list[PairTokens] | None = None
        self._start: TrainingStart | None = None
        self._held_out: tuple[list[PreferencePair], list[PairTokens]] | None = None
        self.position: Position | None = None
        self._explained_empty_round = False
        if self.oracle is not None:
            self.oracle.num_dropped = 0

    @property
    def rounds(self) -> list[RoundRecord]:
        """What happened in the rounds so far."""
        return self.pair_source.records

    @property
    def iterative(self) -> bool:
        """True if the run compares against a comparator, round after round."""
        return self.comparator is not None

    @property
    def current_round(self) -> int:
        """The round in progress, 1-based; 0 before the first."""
        return self._progress.round

    @property
    def env_step(self) -> int:
        """Joint responses sampled for training so far, both sides."""
        return self._progress.env_step

    @override
    def prepare_data(self) -> None:
        set_rows_aside(self._trainer)  # the last call before Lightning opens the loggers

    @override
    def setup(self, stage: str) -> None:
        trainer, module = self._trainer, self._module
        self._held_out = None
        if stage != "fit":
            return
        begin_run(trainer)
        self.start_afresh()
        self._start = TrainingStart(trainer)
        validate_run(self, module)
        schedule = self.schedule
        module.check()
        if self.comparator is not None:
            self.comparator.check(self._team_module.team)
        if self.oracle is not None and isinstance(module, TeamModule):
            self.oracle.view = module.team.role_view
        for given, name in ((self.given_pairs, "pairs"), (self.given_eval_pairs, "eval_pairs")):
            if given is not None:
                read_sources(given, name=name)  # errors before any model is loaded
        if isinstance(module, TeamModule):
            validate_items(self, module)
            if self.evaluator is None:
                rank_zero_warn("no `eval_items` are given, so this run is not evaluated (never on the training items)")
            # Evaluation is the JointEvaluation callback's, and Lightning's validation is for held-out pairs; `teardown`
            # lets this trainer validate again.
            if not self._holds_out_pairs:
                self._limit_val_batches, trainer.limit_val_batches = trainer.limit_val_batches, 0
        trainer.reload_dataloaders_every_n_epochs = 1  # type: ignore[attr-defined]
        self._log_interval.begin(trainer)
        limit = trainer.fit_loop.max_epochs
        if limit is None or limit < 0 or limit > schedule.total_epochs:
            trainer.fit_loop.max_epochs = schedule.total_epochs

    @override
    def teardown(self, stage: str) -> None:
        if stage == "fit" and self._trainer.state.status != TrainerStatus.INTERRUPTED:
            self.pair_source.drop_journals()  # a run that is over has nothing to go on from
        if stage == "fit" and self._limit_val_batches is not None:
            self._trainer.limit_val_batches, self._limit_val_batches = self._limit_val_batches, None
        self._log_interval.end(self._trainer)
        if self._start is not None:
            self._start.end()
            self._start = None

    @override
    def on_exception(self, exception: BaseException) -> None:
        self.teardown("fit")  # Lightning leaves it out

    @override
    def train_dataloader(self) -> PairLoader | RolloutLoader | PlannedLoader:
        if self._start is not None and not self._start.begun:
            return PlannedLoader(self._planned_batches())
        self.position = position = self._prepare_round(completed_epochs(self._trainer))
        if position is None:
            return self._pair_loader([], [], epoch=0)
        loader: PairLoader | RolloutLoader
        if position.phase == "policy":
            loader = self._rollout_loader(position)
        else:
            if self._tokens is None:  # resumed inside a round
                self.training_pairs, self._tokens = self._module.encode_pairs(self.training_pairs)
            loader = self._pair_loader(self.training_pairs, self._tokens, position.epoch)
        epochs = self.schedule.num_rounds * dict(self.schedule.phases)[position.phase]
        self._log_interval.choose(self._trainer, len(loader), epochs)
        return loader

    @override
    def val_dataloader(self) -> PairLoader | list[Any]:
        module = self._module
        if self._trainer.state.fn == "fit":
            return self._held_out_loader() if self._holds_out_pairs else []
        loaders: list[Any] = []
        if isinstance(module, TeamModule) and self.evaluator is not None:
            loaders.append(EvaluationLoader(self.evaluator, module.team, self.batch_size or module.pair_batch_size))
        given = self.given_eval_pairs is not None or (self.given_pairs is not None and not loaders)
        if module.measures_pairs and given:
            loaders.append(self._held_out_loader())
        if not loaders:
            needed = "`eval_items` and `reward_func`" if isinstance(module, TeamModule) else "`pairs`"
            also = ", or `eval_pairs`," if module.measures_pairs else ""
            raise ConfigurationError(f"{needed}{also} must be given to validate or test")
        return loaders

    @override
    def test_dataloader(self) -> PairLoader | list[Any]:
        return self.val_dataloader()

    @property
    def predicted_items(self) -> list[TaskItem]:
        """What ``trainer.predict`` answers: the evaluation items, or without them the training items."""
        return self.items if self.evaluator is None else self.evaluator.items

    @override
    def predict_dataloader(self) -> IndexLoader:
        if not self.predicted_items:
            raise ConfigurationError("`items` or `eval_items` must be given to predict")
        return IndexLoader(len(self.predicted_items))

    @property
    def _holds_out_pairs(self) -> bool:
        """True if this fit measures pairs that it is not trained on."""
        return validates_pairs(self._module, self)

    def _held_out_loader(self) -> PairLoader:
        """Batches of the held-out pairs; outside of a fit and without `eval_pairs`, of all `pairs`."""
        if self._held_out is None:
            pairs = self._read_pairs("pairs") if self.given_pairs is not None else []
            if self.given_eval_pairs is not None:
                training, pairs = pairs, self._read_pairs("eval_pairs")
                warn_of_shared_items(training, pairs)
            elif self._trainer.state.fn == "fit":
                pairs = held_out_split(pairs, self._held_out_fraction, self.seed)[1]
                if not pairs:
                    rank_zero_warn(
                        "all `pairs` have the same prompts, and `val_fraction` holds out whole task items, so none is "
                        "held out; give `eval_pairs` to measure on held-out pairs"
                    )
            self._held_out = self._module.encode_pairs(pairs)
        return self._pair_loader(*self._held_out, epoch=0)

    def _pair_loader(self, pairs: list[PreferencePair], tokens: list[PairTokens], epoch: int) -> PairLoader:
        trainer, module = self._trainer, self._module
        size = self.batch_size or module.pair_batch_size
        place = (batches_per_update(trainer), trainer.global_rank, trainer.world_size, trainer.limit_train_batches)
        epoch = 0 if trainer.overfit_batches else epoch  # type: ignore[attr-defined]  # the same batches every time
        return PairLoader(module.pair_pad_ids(), pairs, tokens, size, self.seed, self._progress.round, epoch, *place)

    def _planned_batches(self) -> int:
        """Batches of a mean epoch if every task item gives as many pairs as it can; replay is not looked at."""
        trainer, module = self._trainer, self._module
        if self.given_pairs is not None:
            pairs = held_out_split(self._read_pairs("pairs"), self._held_out_fraction, self.seed)[0]
            num_pairs = len(pairs)
        else:
            items = min(2, len(self.items)) if trainer.fast_dev_run else len(self.items)  # type: ignore[attr-defined]
            num_pairs = items * most_pairs_of_item(self.num_candidates, self.pairs_per_sample, self.iterative)
        phases = []
        for phase, epochs in self.schedule.phases:
            if phase == "policy":
                batches = len(self._rollout_loader(Position(1, phase, 0)))
            else:
                size = self.batch_size or module.pair_batch_size
                batches = batches_of_pairs(num_pairs, size, trainer.world_size)
            phases.append((epochs, batches))
        return mean_length(phases)

    def _rollout_loader(self, position: Position) -> RolloutLoader:
        trainer, module = self._trainer, self._team_module
        learner, learned = module.policy_stage, module.learned_reward
        assert learner is not None  # its schedule has a policy phase
        oracle = Oracle(learned.score_texts) if learned is not None else self.oracle
        assert oracle is not None  # validate_run
        items = self.items[:2] if trainer.fast_dev_run else self.items  # type: ignore[attr-defined]
        policy_epochs = sum(epochs for phase, epochs in self.schedule.phases if phase == "policy")
        return RolloutLoader(
            learner,
            module.team,
            items,
            oracle,
            self.sampling,
            self.rollout_batch_size,
            self.train_batch_size or self.rollout_batch_size,
            self.seed,
            (position.round - 1) * policy_epochs + position.epoch,
            batches_per_update(trainer),
            trainer.global_rank,
            trainer.world_size,
            trainer.limit_train_batches,
            bool(trainer.overfit_batches),  # type: ignore[attr-defined]
            self._on_rollout,
            (module,),
        )

    def _on_rollout(self, num_responses: int, metrics: dict[str, float]) -> None:
        self._progress.env_step += num_responses
        log_to(self._trainer, {**metrics, "env_step": self._progress.env_step})

    @override
    def state_dict(self) -> dict[str, Any]:
        return {
            "progress": asdict(self._progress),
            "pairs": pairs_to_state(self.training_pairs),
            **self.pair_source.state_dict(),
        }

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._progress = RunProgress(**state_dict["progress"])
        self.training_pairs, self._tokens = pairs_from_state(state_dict["pairs"]), None
        self.pair_source.load_state_dict(state_dict)
        if self.trainer is not None:
            continue_run(self.trainer)

    def evaluate(self, num_samples: int) -> EvaluationBatch | None:
        """One joint response of the current agents to each of the first evaluation items; None without any."""
        if self.evaluator is None:
            return None
        return self.evaluator.evaluate(self._team_module.team, list(range(min(num_samples, len(self.evaluator.items)))))

    def finish(self) -> None:
        """Ends the last round, if all of its epochs are over."""
        if not self._trainer.fit_loop.epoch_loop.batch_progress.is_last_batch:
            return  # Lightning counts an epoch that `max_steps` or a stop cut short as over
        shift = self._progress.skipped_rounds * self.schedule.epochs_per_round
        position = self.schedule.locate(completed_epochs(self._trainer) + shift)
        if position is None or position.round != self._progress.round:
            self._end_round()

    @property
    def trainer(self) -> L.Trainer | None:
        """The trainer that it is attached to."""
        return self._attached

    @trainer.setter
    def trainer(self, trainer: L.Trainer | None) -> None:
        self._attached = trainer
        # The schedule ends a fit. Given no limit, Lightning warns before its first hook that it sets 1000 epochs.
        if trainer is not None and trainer.state.fn == TrainerFn.FITTING and trainer.fit_loop.max_epochs is None:
            trainer.fit_loop.max_epochs = -1

    @property
    def _trainer(self) -> L.Trainer:
        if self.trainer is None:
            raise RunError("the PreferenceDataModule is not attached to a Trainer; use Trainer.fit(module, data)")
        return self.trainer

    @property
    def _module(self) -> LearnerModule:
        module = self._trainer.lightning_module
        if not isinstance(module, LearnerModule):
            raise OptionTypeError(
                f"a PreferenceDataModule feeds the modules of this library, got {type(module).__name__}"
            )
        return module

    @property
    def _team_module(self) -> TeamModule:
        assert isinstance(self._module, TeamModule)  # what needs a team is asked for by the modules that have one
        return self._module

    @property
    def schedule(self) -> RoundSchedule:
        """The rounds of the run and the phases of a round."""
        return self._module.make_schedule(self.iterative)

    def _prepare_round(self, epoch: int) -> Position | None:
        """Brings the state to the round of this epoch; passes over rounds that have nothing to train on."""
        schedule, progress = self.schedule, self._progress
        while True:
            shift = progress.skipped_rounds * schedule.epochs_per_round
            limit = schedule.total_epochs - shift  # also after a resume, which sets the schedule's
            users = self._trainer.fit_loop.max_epochs
            self._trainer.fit_loop.max_epochs = limit if users is None else min(users, limit)
            position = schedule.locate(epoch + shift)
            if position is not None and position.round == progress.round:
                return position
            self._end_round()
            if position is None:
                self._trainer.fit_loop.max_epochs = epoch
                if not epoch and self.given_pairs is not None:
                    rank_zero_warn("none of the `pairs` can be trained on: winner and loser are the same everywhere")
                return None
            self.training_pairs, self._tokens = self._begin_round(position.round)
            progress.round = position.round  # not before: a run that stops in a collection has not begun the round
            if self.training_pairs or not self._module.collects_pairs:
                self._module.begin_round(position.round)
                progress.fitted |= self._module.collects_pairs
                notify(self._trainer, "on_round_prepared", position.round)
                return position
            progress.skipped_rounds += 1

    def _begin_round(self, round_number: int) -> tuple[list[PreferencePair], list[PairTokens]]:
        """Collects or reads a round's pairs; returns those to train on and their tokens."""
        trainer, module = self._trainer, self._module
        if self.given_pairs is not None or not module.collects_pairs:
            notify(trainer, "on_round_start", round_number)
            pairs = self._read_pairs("pairs") if module.collects_pairs else []
            return module.encode_pairs(held_out_split(pairs, self._held_out_fraction, self.seed)[0])
        self.pair_source.open(trainer)
        notify(trainer, "on_round_start", round_number)
        collected = self.pair_source.collect(trainer, self.collector(), self.items, round_number)
        self._progress.env_step += collected.num_responses
        self._progress.total_pairs += len(collected.pairs)
        chosen = self.pair_source.select(self.seed, round_number, collected.pairs, self.iterative)
        pairs, tokens = module.encode_pairs(chosen)
        record = self.rounds[-1]
        record.train_pairs = len(pairs)
        log_round(trainer, record, self._progress, self.oracle.num_dropped if self.oracle is not None else 0)
        notify(trainer, "on_round_collected", record)
        if not pairs:
            self._explain_empty_round(round_number, collected)
        return pairs, tokens

    def _explain_empty_round(self, round_number: int, collected: Collection) -> None:
        """Warns the first time of a run; further rounds only say so."""
        if self._explained_empty_round:
            rank_zero_info(f"round {round_number} has no pairs to train on either, and passes without an update")
            return
        self._explained_empty_round = True
        num_dropped = self.oracle.num_dropped if self.oracle is not None else 0
        rank_zero_warn(why_no_pairs(round_number, collected, num_dropped, self.iterative))

    def _read_pairs(self, name: Literal["pairs", "eval_pairs"]) -> list[PreferencePair]:
        sources = self.given_pairs if name == "pairs" else self.given_eval_pairs
        return read_sources(sources or [], self._module.render_chat, name=name)

    @property
    def _held_out_fraction(self) -> float:
        if self.given_eval_pairs is not None:
            return 0.0
        return self._module.val_fraction if self.val_fraction is None else self.val_fraction

    def collector(self) -> Collector:
        """How the next round is collected."""
        oracle, learned = self.oracle, self._module.learned_reward
        if self.preference_scoring_reward == "reward_model" and self._progress.fitted and learned is not None:
            oracle = Oracle(learned.score_texts)
        how = (self.sampling, self.num_candidates, self.pair_selection, self.pairs_per_sample, self.seed)
        return Collector(oracle, *how, self.comparator, self.judge, self.max_concurrency, self._judge_identity)

    def _end_round(self) -> None:
        if self._progress.ended_round < self._progress.round:
            self._progress.ended_round = self._progress.round
            notify(self._trainer, "on_round_end", self._progress.round)
