"""Fast paths: the same results as a plain expression, in less time on a CPU.

`FAST_PATHS` says for each when it applies, what it replaces and what it gains. Calls do not go
through the table, because a look-up would cost what small cases save. `reference()` switches all of
them off.
"""
