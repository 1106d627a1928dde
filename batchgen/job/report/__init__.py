"""The report of a job: what became of it and why it was as fast as it was, as HTML and as JSON.

`collect` reads an output folder, `page` and `plots` draw, `compare` puts two folders side by side, `write`
puts the files in place. `run` calls `write_report` at the end of each attempt, `batchgen report` at any time.
"""
