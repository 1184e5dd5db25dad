"""Mutation runs: which small changes of the library do the tests without Ray detect?

A mutant is the library with one small change: `<` becomes `<=`, a call is removed, a loop does not
run. If the tests pass with a mutant, they do not check the changed line. From the root of the
repository::

    pip install cosmic-ray coverage
    python -m tests.mutation --per-area 25 --seed 0

1. All tests of `TESTS` run once under coverage, which records the tests of each line.
2. Each area gets a sample of mutants, at most one per line. The seed and the text of the lines
   determine the sample.
3. The tests of the changed line run until one fails or hangs: the mutant is killed. Otherwise it
   has survived, or no test covers the line.

The score is the share of killed mutants. Some mutants change nothing that a user could see, so
compare scores with each other, not with 100 %. Results stay in `build/mutation` until the sources
or the tests change: an interrupted run continues there.
"""
