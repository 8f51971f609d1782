# Sourced by each script: a virtual environment with these packages, as $VENV. Scripts with equal packages share one.
set -euo pipefail
export PYTHONWARNINGS=ignore PIP_DISABLE_PIP_VERSION_CHECK=1
VENV="${TMPDIR:-/tmp}/marlvec-findings/$(printf '%s\n' "$@" | sha256sum | cut -c1-16)"
if [ ! -e "$VENV/done" ]; then
    rm -rf "$VENV"
    "${PYTHON:-python3}" -m venv "$VENV"
    "$VENV/bin/python" -m pip install --quiet "$@"
    touch "$VENV/done"
fi
