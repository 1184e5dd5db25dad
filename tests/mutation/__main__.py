"""The command: tests a sample of mutants and writes the scores."""

import argparse
import json
from dataclasses import asdict

import tests.mutation
from tests.mutation.mutants import AREAS, sample
from tests.mutation.runs import WORK, judge, measure, prepare

OUTCOMES = ("killed", "survived", "not covered")


def table(results):
    """Return the scores by area, as Markdown."""
    rows = [
        "| area | mutants | killed | survived | not covered | score |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for area in [*dict.fromkeys(result["area"] for result in results), "all"]:
        some = [result for result in results if area in (result["area"], "all")]
        counts = [sum(result["outcome"] == outcome for result in some) for outcome in OUTCOMES]
        score = f"{100 * counts[0] / len(some):.0f} %"
        rows.append(f"| {' | '.join(map(str, (area, len(some), *counts, score)))} |")
    return "\n".join(rows) + "\n"


def survivors(results):
    """Return the mutants that no test detects, each with its change, as Markdown."""
    return "\n".join(
        f"{result['file']}:{result['line']}: {result['outcome']} by {result['num_tests']} tests\n\n"
        + "\n".join(["```diff", *result["change"], "```", ""])
        for result in results
        if result["outcome"] != "killed"
    )


def main():
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutation",
        description=tests.mutation.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--per-area", type=int, default=25, help="mutants of each area (25)")
    parser.add_argument("--area", choices=AREAS, action="append", help="only this area; repeatable")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sample (0)")
    options = parser.parse_args()
    kept = WORK / f"{prepare()}.json"
    if not kept.exists():
        measure()
        kept.write_text("{}")
    known, results = json.loads(kept.read_text()), []
    for area in options.area or AREAS:
        for mutant in sample(area, options.per_area, options.seed):
            if str(mutant) not in known:
                known[str(mutant)] = judge(mutant)
                kept.write_text(json.dumps(known))
            results.append({"area": area, **asdict(mutant), **known[str(mutant)]})
            print(f"{mutant}: {results[-1]['outcome']}", flush=True)
    (WORK / "survivors.md").write_text(survivors(results))
    print(table(results))


if __name__ == "__main__":
    main()
