"""``python -m moe_dispatch.cli``: the command where its script is not on the path, as under torchrun -m."""

import sys

from moe_dispatch.cli import main

if __name__ == "__main__":
    sys.exit(main())
