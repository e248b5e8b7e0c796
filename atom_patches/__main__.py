"""`python -m atom_patches`: look at the overlay, without arming this process."""

import sys

from atom_patches import arming

arming.disarm()


def main() -> int:
    """What `atom-patches` runs, too."""
    from atom_patches import cli

    return cli.main()


if __name__ == "__main__":
    sys.exit(main())
