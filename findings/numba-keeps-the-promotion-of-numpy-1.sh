#!/usr/bin/env bash
# Versions: numba 0.68.1, numpy 2.4.6, Python 3.11.7; seen 2026-11-29.
# Guess: a jitted function gives numpy's numbers and dtypes: mean of float32 is float32, int8 wraps in int8.
# Behaviour: it promotes as it always did, not as numpy 2: float32 * 2.0 and the sum, mean and norm of float32 are float64,
#   int8 array + 100 is int64 and does not wrap, and the difference of two uint8 numbers is a uint64 of 20 digits.
# Output seen: difference of uint8: 255 by numpy, 18446744073709551615 by numba
set -euo pipefail
export PYTHONWARNINGS=ignore PIP_DISABLE_PIP_VERSION_CHECK=1
VENV="$(mktemp -d)" && trap 'rm -rf "$VENV"' EXIT
"${PYTHON:-python3}" -m venv "$VENV" && "$VENV/bin/python" -m pip install --quiet numba==0.68.1 numpy==2.4.6
"$VENV/bin/python" - <<'PY'
import numba
import numpy as np

CASES = {
    "float32 * 2.0": (lambda x: x * 2.0, np.ones(2, np.float32), "float32", "float64"),
    "sum of float32": (lambda x: np.sum(x), np.ones(2, np.float32), "float32", "float64"),
    "mean of float32": (lambda x: np.mean(x), np.ones(2, np.float32), "float32", "float64"),
    "int8 + 100": (lambda x: x + 100, np.full(2, 100, np.int8), "int8", "int64"),
    "difference of uint8": (lambda x: x[0] - x[1], np.array([0, 1], np.uint8), "uint8", "uint64"),
}
for name, (function, argument, by_numpy, by_numba) in CASES.items():
    with np.errstate(over="ignore"):
        plain = np.asarray(function(argument))
    jitted = np.asarray(numba.njit(function)(argument))
    print(f"{name}: {plain.tolist()} {plain.dtype} by numpy, {jitted.tolist()} {jitted.dtype} by numba")
    # A Python int comes back from a jitted function for a whole number, so the size is read off its value.
    assert str(plain.dtype) == by_numpy
    assert str(jitted.dtype) == by_numba
PY
