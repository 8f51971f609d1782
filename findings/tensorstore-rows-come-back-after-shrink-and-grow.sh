#!/usr/bin/env bash
# Versions: tensorstore 0.1.86, numpy 2.4.6, Python 3.11.7; seen 2026-11-29.
# Guess: an array that is resized to fewer rows and then back to more has the fill value in the new rows.
# Behaviour: only where the lost rows filled whole chunks. Rows in a chunk of which something was kept are still in it, and
#   come back with their old numbers: a recording that is cut to a safe length and then goes on shows what was cut off until
#   each row is written again. zarr and zarr3 alike.
# Output seen: chunks of 3 rows, cut to 2, grown to 4: [1, 2, 3, 0]
set -euo pipefail
export PYTHONWARNINGS=ignore PIP_DISABLE_PIP_VERSION_CHECK=1
VENV="$(mktemp -d)" && trap 'rm -rf "$VENV"' EXIT
"${PYTHON:-python3}" -m venv "$VENV" && "$VENV/bin/python" -m pip install --quiet tensorstore==0.1.86 numpy==2.4.6
"$VENV/bin/python" - <<'PY'
import tempfile

import numpy as np
import tensorstore as ts


def again(driver, rows):
    layout = {"chunks": [rows]}
    if driver == "zarr3":
        layout = {"chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [rows]}}}
    with tempfile.TemporaryDirectory() as folder:
        spec = {"driver": driver, "kvstore": {"driver": "file", "path": folder}, "metadata": layout}
        store = ts.open(spec, create=True, dtype=ts.int32, shape=[4]).result()
        store.write(np.arange(1, 5, dtype=np.int32)).result()
        for size in (2, 4):
            store = store.resize(exclusive_max=[size]).result()
        return store.read().result().tolist()


for driver in ("zarr", "zarr3"):
    for rows, seen in ((4, [1, 2, 3, 4]), (3, [1, 2, 3, 0]), (2, [1, 2, 0, 0])):
        found = again(driver, rows)
        print(f"{driver}, chunks of {rows} rows, cut to 2, grown to 4: {found}")
        assert found == seen
PY
