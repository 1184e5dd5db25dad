"""Mutation runs: which small changes of the library do the tests without Ray notice?

A mutant is the library with one small change: `<` becomes `<=`, a call is left out, a loop does
not run. Where the tests pass in spite of it, they do not hold what that line promises. From the
root of the repository::

    pip install cosmic-ray coverage
    python -m tests.mutation --per-area 25 --seed 0 --out build/mutation/scores.json

1. All tests of `TESTS` run once under coverage: which of them execute which line?
2. Of each area mutants are sampled: of each file in proportion to its lines, at most one a line.
   The sample follows from the seed and the text of the lines, so that it is always the same for a
   commit, and a change elsewhere in a file leaves most of it as it is.
3. For each mutant those tests run that execute its line, until one fails or hangs: the mutant is
   killed. If none does, it has survived; if no test executes the line, it is not covered.

The score is the share of mutants that are killed. A mutant that changes nothing a user could see
(a longer timeout, a cache that is left out) survives rightly: compare scores with each other, not
with 100 %.

What has been found out stays in `build/mutation`, until the sources or the tests change: a run that
was interrupted goes on where it was.
"""
