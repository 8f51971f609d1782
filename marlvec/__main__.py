"""``python -m marlvec`` is the ``marlvec`` command."""

from marlvec.cli import main

main()
