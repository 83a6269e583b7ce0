"""Collection against a slow remote comparator: how much concurrent requests save.

A loopback server answers each request after 200 ms. The same round is collected with one request at a time and with
eight, by the tiny team, one candidate per request:

    python benchmarks/api_concurrency.py
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from fake_api import FakeApi
from pbrl_lightning import AgentTeam, ApiComparator, ApiEndpoint, SamplingConfig
from pbrl_lightning.preferences.collector import Collector
from pbrl_lightning.preferences.oracle import Oracle
from pbrl_lightning.tasks.coordination import same_last_letter, train_items


def collect(team: AgentTeam, api: FakeApi, concurrency: int, candidates: int) -> tuple[float, int]:
    """Seconds of one round, and its requests."""
    endpoint = ApiEndpoint(api.url_of("anthropic"), "anthropic", "any", max_concurrency=concurrency)
    sampling = SamplingConfig(temperature=1.0, top_p=1.0, max_new_tokens=4)
    oracle = Oracle(same_last_letter)
    collector = Collector(oracle, sampling, candidates, "comparator_reward", 4, 0, ApiComparator(endpoint))
    items = train_items()[:8]
    before, started = len(api.requests), time.monotonic()
    collector.collect(team, items, list(range(len(items))), 1)
    return time.monotonic() - started, len(api.requests) - before


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--latency", type=float, default=0.2, help="seconds that the server takes (0.2)")
    parser.add_argument("--candidates", type=int, default=4, help="candidates per role and item (4)")
    options = parser.parse_args()
    team = AgentTeam("builtin:tiny", num_agents=2).load()
    with FakeApi(latency=options.latency) as api:
        collect(team, api, 8, 1)  # warm up
        rows = {concurrency: collect(team, api, concurrency, options.candidates) for concurrency in (1, 2, 4, 8)}
    alone = rows[1][0]
    print(f"{'at once':>8}  {'requests':>8}  {'seconds':>8}  {'ratio':>6}")
    for concurrency, (seconds, requests) in rows.items():
        print(f"{concurrency:>8}  {requests:>8}  {seconds:>8.2f}  {alone / seconds:>5.1f}x")


if __name__ == "__main__":
    main()
