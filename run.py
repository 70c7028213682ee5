"""Start here: `python run.py --config-name NAME [section.key=value ...]`."""

from __future__ import annotations

import sys

from flagscale.run import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
