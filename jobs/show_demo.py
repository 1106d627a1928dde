"""Print a few rows of the demo's results; called by `make demo`."""

from pathlib import Path

import pyarrow.dataset as ds

OUT = Path(__file__).resolve().parent.parent / "out" / "demo"

table = ds.dataset(sorted(str(p) for p in (OUT / "data").glob("*.parquet"))).to_table()
print(f"\n{table.num_rows} rows in {OUT / 'data'}; the first three:")
for row in table.slice(0, 3).to_pylist():
    print(f"\n  {row['id']} ({row['status']}, {row['finish_reason']}) {row['entry_point']}:")
    print(f"    {' '.join((row['generated_text'] or '').split())}")
print(f"\nRead them all: pandas.read_parquet('{OUT / 'data'}')")
