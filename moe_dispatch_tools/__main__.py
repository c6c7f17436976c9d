"""``python -m moe_dispatch_tools``: the command without its script, for example under ``torchrun -m``."""

import sys

from moe_dispatch_tools import main

if __name__ == "__main__":
    sys.exit(main())
