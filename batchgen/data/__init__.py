"""Input files to rows, rows and results to output files.

`source.open_input` reads, `results.plan_output` decides the columns of the output,
`sink.write_part` writes. Nothing here imports torch; pyarrow loads with those modules only.
"""
