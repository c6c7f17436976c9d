"""``python -m moe_dispatch.cli``: the command without its script, for example under ``torchrun -m``."""

import sys

from moe_dispatch.cli import main

if __name__ == "__main__":
    sys.exit(main())
