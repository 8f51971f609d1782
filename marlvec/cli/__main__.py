"""``python -m marlvec.cli`` is the ``marlvec`` command."""

from marlvec.cli.app import main

main()
