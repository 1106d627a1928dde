"""What Python programs use: `batchgen.map`, `Job`, `open` and `LLM`."""
