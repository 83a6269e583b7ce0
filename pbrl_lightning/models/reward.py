"""JointRewardModel: one number for a team's whole answer, learned from preferences."""

from __future__ import annotations

import warnings
from typing import Self

import torch
from typing_extensions import override

from pbrl_lightning.agents.loading import resolve_source
from pbrl_lightning.batches import PairTokens, PreferencePair
from pbrl_lightning.models.classifier import has_classifier
from pbrl_lightning.models.head import ClassifierHead
from pbrl_lightning.models.scalar import ScalarModel
from pbrl_lightning.models.text_end import closing_tokens, detect_text_end
from pbrl_lightning.preferences.pair_tokens import collate_rows, drop_identical
from pbrl_lightning.timing import spending
from pbrl_lightning.utils.errors import ConfigurationError

TOKEN_BUDGET = 16384
"""Most tokens (padding counted) scored in one forward."""


class JointRewardModel(ScalarModel):
    """Reads all prompts and all responses of a team as one text, prompts first; see :class:`ScalarModel`.

    Prompts and responses are tokenized separately: a tokenizer that gets the whole text as one string may give other
    tokens at the boundary, and the score is another.
    """

    @override
    def load(self) -> Self:
        if self._team and not has_classifier(self._team[0].load().model(0)):
            raise ConfigurationError(
                f"{type(self._team[0].model(0)).__name__} has no sequence classifier in transformers, the form in "
                "which reward models are saved; name another `model`"
            )
        if not self.is_loaded:
            super().load()
            self.closing_ids = closing_tokens(self.tokenizer) if self._ends_with_eos() else []
        return self

    def _ends_with_eos(self) -> bool:
        """As the options say, or as the loaded model was trained; texts of a new head end without EOS."""
        if self.joint_text_eos is not None:
            return self.joint_text_eos
        if not self.fitted or self.classifier is None:
            return False
        source = resolve_source(self.given_name) if self.given_name is not None else None
        saved = [place for place in (source.adapter, source.base) if place is not None] if source is not None else []
        both_ways = isinstance(self.head, ClassifierHead)
        end = detect_text_end(self.classifier.config, self.tokenizer, saved, both_ways)
        if end.doubt is not None:
            warnings.warn(
                f"the reward model {self.given_name or 'in memory'} does not say whether its texts ended with EOS "
                f"({end.doubt}); it reads them {'with' if end.eos else 'without'} EOS here. Set its "
                "`joint_text_eos` to true or false",
                stacklevel=2,
            )
        return end.eos

    @spending("tokenising")
    def encode_pairs(self, pairs: list[PreferencePair]) -> tuple[list[PreferencePair], list[PairTokens]]:
        """The pairs whose sides differ as tokens, each as the pair of two joint texts; others are counted."""
        tokens = []
        for pair in pairs:
            prefix, (winner, loser) = self.joint_tokens(pair.prompts, [pair.winner_completions, pair.loser_completions])
            tokens.append(PairTokens([prefix], [winner], [loser]))
        return drop_identical(pairs, tokens, self.counts)

    @torch.no_grad()
    def score_texts(self, *completions: list[str], prompts: list[list[str]]) -> list[float]:
        """Scores joint responses; has the form of a task reward, so that it can take its place.

        Args:
            *completions: ``N`` lists of ``B`` texts.
            prompts: ``N`` lists of ``B`` texts.

        Returns:
            ``B`` numbers.
        """
        rows = []
        for row_prompts, row_texts in zip(zip(*prompts, strict=True), zip(*completions, strict=True), strict=True):
            prefix, (response,) = self.joint_tokens(row_prompts, [row_texts])
            rows.append((prefix, response))
        scores: list[float] = [0.0] * len(rows)
        order = sorted(range(len(rows)), key=lambda row: len(rows[row][0]) + len(rows[row][1]), reverse=True)
        while order:
            width = sum(map(len, rows[order[0]]))
            size = max(1, TOKEN_BUDGET // max(1, width))
            batch, order = order[:size], order[size:]
            tokens = collate_rows([rows[row][0] for row in batch], [rows[row][1] for row in batch], self.pad_id)
            for row, score in zip(batch, self(tokens.to(self.device)).tolist(), strict=True):
                scores[row] = score
        return scores
