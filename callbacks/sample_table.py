"""Shows joint responses of each collection."""

from __future__ import annotations

import lightning as L
from typing_extensions import override

from pbrl_lightning.media import log_table
from pbrl_lightning.preferences.collector import Collection
from pbrl_lightning.rounds import RoundCallback
from pbrl_lightning.samples import pair_samples, table_of
from pbrl_lightning.utils.errors import ConfigurationError


class SampleTable(RoundCallback):
    """Logs a table of winners and losers with their scores after each collection, ``collect/samples``.

    Of the first task items that gave a pair, the first pair of each. Added by itself to runs with a logger.

    Args:
        num_items: Most task items.
    """

    def __init__(self, num_items: int = 4) -> None:
        if num_items < 1:
            raise ConfigurationError(f"`num_items` must be >= 1, got {num_items}")
        self.num_items = num_items

    @override
    def on_round_scored(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        round_number: int,
        collected: Collection,
        reward_range: tuple[float, float] | None,
    ) -> None:
        if trainer.is_global_zero and collected.pairs:
            log_table(trainer, "collect/samples", *table_of(pair_samples(collected.pairs, self.num_items)))
