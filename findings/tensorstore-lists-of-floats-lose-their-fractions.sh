#!/usr/bin/env bash
# Versions: tensorstore 0.1.86, numpy 2.4.6, Python 3.11.7; seen 2026-11-29.
# Guess: writing floats into an int32 store raises.
# Behaviour: it does for a numpy array (TypeError: no safe cast), and not for a list or a number: those are cut to ints
#   without a word. NaN in a list raises, a number too large raises.
# Output seen: list [1, -1, 2]; numpy.float64 [1, 1, 1]; array: TypeError
set -euo pipefail
export PYTHONWARNINGS=ignore PIP_DISABLE_PIP_VERSION_CHECK=1
VENV="$(mktemp -d)" && trap 'rm -rf "$VENV"' EXIT
"${PYTHON:-python3}" -m venv "$VENV" && "$VENV/bin/python" -m pip install --quiet tensorstore==0.1.86 numpy==2.4.6
"$VENV/bin/python" - <<'PY'
import numpy as np
import tensorstore as ts

store = ts.open({"driver": "zarr", "kvstore": {"driver": "memory"}}, create=True, dtype=ts.int32, shape=[3]).result()


def written(value):
    try:
        store.write(value).result()
    except (TypeError, ValueError) as error:
        return type(error).__name__
    return store.read().result().tolist()


found = {
    "list": written([1.9, -1.9, 2]),
    "numpy.float64": written(np.float64(1.9)),
    "array": written(np.array([1.9, -1.9, 2])),
    "NaN in a list": written([float("nan"), 1, 2]),
}
print(found)
assert found == {"list": [1, -1, 2], "numpy.float64": [1, 1, 1], "array": "TypeError", "NaN in a list": "ValueError"}
PY
