"""`python -m shardline` is the `shardline` command."""

from __future__ import annotations

import sys

from shardline.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
