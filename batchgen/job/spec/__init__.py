"""The job file as frozen models: every key that this version implements, with what it allows.

One module for each section of the file; `job.JobSpec` is a whole one. `load_job` makes it; the supervisor,
`validate` and `show` read it. A key that the job file's format knows but this version does not implement is
listed in `unavailable.py`, not here.
"""
