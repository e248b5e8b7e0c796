"""`python -m atom_patches`: look at the overlay, without arming this process."""

import sys

from atom_patches import arming

arming.disarm()

if __name__ == "__main__":
    from atom_patches.cli import main

    sys.exit(main())
