#!/usr/bin/env bash
# Versions: tensorstore 0.1.86, numpy 2.4.6, Python 3.11.7; seen 2026-11-29.
# Guess: store.write(array) copies the array before it returns, so that a buffer may be filled anew at once.
# Behaviour: it keeps the array itself, a small one too, until its future `copy` is done: what is written into the array
#   before that is stored. (Its documentation says so.) store[...] = array waits, and is safe.
# Output seen: write, then fill(9): [9, 9, 9]; after .copy.result(): [0, 1, 2]; store[:] = array: [0, 1, 2]
set -euo pipefail
export PYTHONWARNINGS=ignore PIP_DISABLE_PIP_VERSION_CHECK=1
VENV="$(mktemp -d)" && trap 'rm -rf "$VENV"' EXIT
"${PYTHON:-python3}" -m venv "$VENV" && "$VENV/bin/python" -m pip install --quiet tensorstore==0.1.86 numpy==2.4.6
"$VENV/bin/python" - <<'PY'
import numpy as np
import tensorstore as ts


def stored(how):
    spec = {"driver": "zarr", "kvstore": {"driver": "memory"}}
    store = ts.open(spec, create=True, dtype=ts.int32, shape=[3]).result()
    array = np.arange(3, dtype=np.int32)
    if how == "assigned":
        store[:] = array
        array.fill(9)
    else:
        future = store.write(array)
        if how == "copied":
            future.copy.result()
        array.fill(9)
        future.result()
    return store.read().result().tolist()


found = {how: stored(how) for how in ("written", "copied", "assigned")}
print(found)
assert found == {"written": [9, 9, 9], "copied": [0, 1, 2], "assigned": [0, 1, 2]}
PY
