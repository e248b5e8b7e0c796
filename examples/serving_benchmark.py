"""Measure a running SGLang server with SGLang's own benchmark: one line for each shape and concurrency.

    python examples/serving_benchmark.py --model MODEL [--url http://127.0.0.1:30000]
    python examples/serving_benchmark.py --model MODEL --shapes 8192/1024 --concurrency 16

Prompts are random tokens, so nothing is downloaded; each level sends four times as many as run at once, after the
prefix cache is emptied. SGLang's benchmark wants `pip install datasets` even so. Its own lines of JSON go to --output.
A model of the tests on two cores, with --shapes 64/8,32/8 --concurrency 2,4 --times 2, printed

    input/output  at once   requests   seconds   output tok/s   first token ms   next token ms
    64/8                2          4       0.6           49.7            172.2           19.80
    64/8                4          8       2.1           30.3            631.5           57.73
    32/8                2          4       1.2           26.1            290.7           44.97
    32/8                4          8       2.2           29.5            872.0           17.09
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

SHAPES = "8192/1024,1024/1024"
CONCURRENCY = "4,16,64"
COLUMNS = (
    ("seconds", "duration", 10, ".1f"),
    ("output tok/s", "output_throughput", 15, ".1f"),
    ("first token ms", "median_ttft_ms", 17, ".1f"),
    ("next token ms", "median_tpot_ms", 16, ".2f"),
)


def measure(args: argparse.Namespace, shape: tuple[int, int], at_once: int, output: Path) -> dict[str, Any]:
    """One run of SGLang's benchmark.

    Raises:
        SystemExit: it failed; what it said stands above.
    """
    sent = at_once * args.times
    command = [
        *(sys.executable, "-m", "sglang.bench_serving", "--backend", "sglang-oai", "--base-url", args.url),
        *("--model", args.model, "--dataset-name", "random-ids", "--random-range-ratio", "1"),
        *("--random-input-len", str(shape[0]), "--random-output-len", str(shape[1])),
        *("--num-prompts", str(sent), "--max-concurrency", str(at_once), "--seed", "1"),
        *("--flush-cache", "--disable-tqdm", "--output-file", str(output)),
    ]
    ran = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if ran.returncode:
        raise SystemExit(f"{ran.stdout}\n{' '.join(command)}\nended with status {ran.returncode}")
    found = json.loads(output.read_text().splitlines()[-1])
    if found["completed"] != sent:
        raise SystemExit(f"{ran.stdout}\nof {sent} requests {found['completed']} were answered")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="what the server serves: its tokenizer is read")
    parser.add_argument("--url", default="http://127.0.0.1:30000")
    parser.add_argument("--shapes", default=SHAPES, help="INPUT/OUTPUT tokens, separated by commas")
    parser.add_argument("--concurrency", default=CONCURRENCY, help="requests at once, separated by commas")
    parser.add_argument("--times", type=int, default=4, help="so many times as many requests in all")
    parser.add_argument("--output", type=Path, help="a file for SGLang's own results")
    args = parser.parse_args()
    titles = "".join(f"{title:>{width}}" for title, _, width, _ in COLUMNS)
    print(f"{'input/output':<14}{'at once':>7}{'requests':>11}{titles}", flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        output = args.output or Path(scratch) / "results.jsonl"
        for shape in args.shapes.split(","):
            taken, given = map(int, shape.split("/"))
            for at_once in map(int, args.concurrency.split(",")):
                found = measure(args, (taken, given), at_once, output)
                values = "".join(f"{found[name]:>{width}{form}}" for _, name, width, form in COLUMNS)
                print(f"{shape:<14}{at_once:>7}{found['completed']:>11}{values}", flush=True)


if __name__ == "__main__":
    main()
