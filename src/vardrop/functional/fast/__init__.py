"""Fast paths: the same results as a plain expression, in less time on a CPU.

`FAST_PATHS` lists what each one replaces and what it gains. Calls do not go through the table,
because a look-up would be as slow as the time that small cases save. `reference()` switches all of
them off.
"""
