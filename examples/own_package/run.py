"""A patch of your own, for a package of your own choice: `shop`, which adds up prices.

    python examples/own_package/run.py            # the patch is applied where it is asked for
    python examples/own_package/run.py review     # writes down the source that the patch was written for

`shop_patches` is all that you write: what the package is (`__init__.py`), where its configuration is handed over
(`bootstrap/till.py`), and the patch (`rounding/total.py`). `review` has to run again when a new release of `shop` was
read. This prints

    EUR: 10.03, shop.rounding.total is inactive: the currency is EUR
    CHF: 10.05, shop.rounding.total is applied: in place; the source of shop 2.1 is as reviewed
    EUR again: 10.03, shop.rounding.total is inactive: the currency is EUR
    CHF, in a release that adds up differently:
    atom_patches stops the launch of shop 2.1:
      - shop.rounding.total (correctness, drifted): shop.till:Till.total changed (…). Install shop>=2,<3; or …
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
sys.path.append(str(HERE))

from shop_patches import ENGINE, arm  # noqa: E402

from atom_patches.core import discovery, reviewed  # noqa: E402
from atom_patches.core.registry import REGISTRY  # noqa: E402


def pay(currency: str) -> str:
    """What a customer pays, and where the patch stands then."""
    from shop.till import Config, Till

    till = Till(Config(currency))
    (patch,) = (one for one in REGISTRY.status("shop") if one.id == "shop.rounding.total")
    return f"{till.total([4.99, 5.04]):.2f}, {patch.id} is {patch.state}: {patch.reason}"


def in_another_release() -> str:
    """What happens in a process with a `shop` that adds up in another way: its last lines."""
    with tempfile.TemporaryDirectory() as folder:
        till = Path(shutil.copytree(HERE / "shop", Path(folder) / "shop")) / "till.py"
        till.write_text(till.read_text().replace("round(sum(prices), 2)", "sum(prices)"))
        code = f"import sys; sys.path[:0] = [{folder!r}, {str(HERE)!r}]; import run; run.arm(); run.pay('CHF')"
        ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    return "\n".join(ended.stderr.splitlines()[-2:])


def main() -> None:
    if sys.argv[1:] == ["review"]:
        print(reviewed.ship(ENGINE, discovery.load(ENGINE), "2.1"))
        return
    arm()
    print("EUR:", pay("EUR"))
    print("CHF:", pay("CHF"))
    print("EUR again:", pay("EUR"))
    print("CHF, in a release that adds up differently:")
    print(in_another_release())


if __name__ == "__main__":
    main()
