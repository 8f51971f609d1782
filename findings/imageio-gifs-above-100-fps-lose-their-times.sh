#!/usr/bin/env bash
# Versions: imageio 2.38.1, imageio-ffmpeg 0.8.1 (ffmpeg 9.0.2), pillow 13.0.0, numpy 2.4.6, Python 3.11.7; seen 2026-11-29.
# Guess: a GIF of frames of 8 ms comes back with 10 ms a frame, the shortest above nothing (33 ms comes back as 30); ffmpeg's
#   GIF of 60 frames at 120 fps lasts their half second.
# Behaviour: imageio writes a delay of 0, which viewers replace by what they like (often 100 ms). ffmpeg keeps all frames at
#   10 ms each, so that the film is slower than it was asked to be; at 30 and 60 fps it is right.
# Output seen: imageio: 8 ms -> 0, 33 ms -> 30; ffmpeg: 60 fps 1000 ms, 120 fps 600 ms (asked: 500)
set -euo pipefail
export PYTHONWARNINGS=ignore PIP_DISABLE_PIP_VERSION_CHECK=1
VENV="$(mktemp -d)" && trap 'rm -rf "$VENV"' EXIT
"${PYTHON:-python3}" -m venv "$VENV" && "$VENV/bin/python" -m pip install --quiet imageio==2.38.1 imageio-ffmpeg==0.8.1 pillow==13.0.0 numpy==2.4.6
"$VENV/bin/python" - <<'PY'
import tempfile
from pathlib import Path

import imageio
import imageio_ffmpeg
import numpy as np
from PIL import Image, ImageSequence

FRAMES = [np.random.default_rng(k).integers(0, 256, (32, 32, 3)).astype(np.uint8) for k in range(60)]


def delays(path):
    with Image.open(path) as film:
        return [frame.info.get("duration", 0) for frame in ImageSequence.Iterator(film)]


with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "film.gif"
    by_imageio, by_ffmpeg = {}, {}
    for asked in (8, 33, 50):
        imageio.mimsave(path, FRAMES[:5], duration=asked)
        by_imageio[asked] = delays(path)
    for fps in (30, 60, 120, 200):
        film = imageio_ffmpeg.write_frames(
            str(path), (32, 32), fps=fps, codec="gif", pix_fmt_out="rgb8", quality=None, ffmpeg_log_level="error"
        )
        film.send(None)
        for frame in FRAMES:
            film.send(frame)
        film.close()
        by_ffmpeg[fps] = len(delays(path)), sum(delays(path))
print("imageio, ms asked:", by_imageio)
print("ffmpeg, fps asked: (frames, ms in all)", by_ffmpeg)
assert set(by_imageio[8]) == {0} and set(by_imageio[33]) == {30} and set(by_imageio[50]) == {50}
assert {frames for frames, _ in by_ffmpeg.values()} == {60}
assert abs(by_ffmpeg[30][1] - 2000) <= 10 and abs(by_ffmpeg[60][1] - 1000) <= 10
assert by_ffmpeg[120][1] == by_ffmpeg[200][1] == 600
PY
