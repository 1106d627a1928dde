"""How fast is it, of what the machine can do, and beside others? The `bench` verb.

`contest.py` starts measured runs, each in a process of its own: ours (`ours.py`) and those of other engines
(`peers/`), which share `peers/harness.py`. `table.py` prints what they found.
"""
