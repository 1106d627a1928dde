"""One measured run of another engine, each file a script's part; run by its own Python, without batchgen.

`harness.py NAME …` imports NAME from this folder. Such a module has `load(job) -> Contestant`.
"""
