"""Does each algorithm learn? Evaluation reward against samples, several seeds, controls: docs/results.md.

    python benchmarks/results.py [--only WORD …] [--seeds 0 1 2] [--jobs 2] [--no-page] [--list]

Runs what `docs/results.json` lacks, writes each run there when it ends, then the page and its pictures anew. Stopped at
any time it goes on from there; a run counts as there if its row, seed and configuration are the same.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.results_parts import page, plots, record  # noqa: E402
from benchmarks.results_parts.rows import ROWS, Row  # noqa: E402
from benchmarks.results_parts.running import Result, run  # noqa: E402


def results_of(todo: list[tuple[Row, int]], jobs: int, cache: Path, overrides: tuple[str, ...]) -> Iterator[Result]:
    """Each run when it is over, in this process or in several."""
    if jobs == 1:
        yield from (run(row, seed, cache, overrides) for row, seed in todo)
        return
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        for done in as_completed([pool.submit(run, row, seed, cache, overrides) for row, seed in todo]):
            yield done.result()


def main() -> None:
    """Runs, writes, draws."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", nargs="+", default=[""], metavar="WORD", help="rows whose name begins with one of these"
    )
    parser.add_argument("--seeds", type=int, nargs="+", help="instead of those of the page")
    parser.add_argument("--jobs", type=int, default=1, help="processes, a thread each (1)")
    parser.add_argument("--results", type=Path, default=ROOT / "docs/results.json", help="where runs are kept")
    parser.add_argument("--no-page", action="store_true", help="runs only")
    parser.add_argument("--list", action="store_true", help="names of the rows, and what is missing")
    options, overrides = parser.parse_known_args()
    os.chdir(ROOT)
    rows = [row for row in ROWS if row.name.startswith(tuple(options.only))]
    if not rows:
        parser.error(f"--only must begin the name of a row, got {options.only}; --list shows them")
    results = record.read(options.results)
    todo = record.missing(results, rows, options.seeds)
    if options.list:
        lacking = {row.name for row, _ in todo}
        print("\n".join(f"{'missing' if row.name in lacking else 'there':<8} {row.name}" for row in rows))
        return
    print(f"{len(todo)} of {len(record.missing({}, rows, options.seeds))} runs to go", flush=True)
    for result in results_of(todo, options.jobs, ROOT / "runs/results", tuple(overrides)):
        results[result["name"], result["seed"]] = result
        record.write(options.results, results)
        print(
            f"{result['name']} seed {result['seed']}: {result['before']:.3f} -> {result['after']:.3f}, gain "
            f"{result['gain']:+.3f} +- {result['error']:.3f}, {result['samples']} samples, {result['seconds']:.0f} s",
            flush=True,
        )
    if not options.no_page:
        write_page(results)


def write_page(results: dict[record.Key, Result]) -> None:
    """The page and its pictures."""
    path = ROOT / "docs/results.md"
    path.write_text(page.render(path.read_text(encoding="utf-8"), results), encoding="utf-8")
    plots.draw(ROOT / "docs/pictures", results)


if __name__ == "__main__":
    main()
