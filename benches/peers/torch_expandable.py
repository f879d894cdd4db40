#!/usr/bin/env python3
"""What growing costs in PyTorch on the same card, with expandable segments and without.

    python3 benches/peers/torch_expandable.py            # a table
    python3 benches/peers/torch_expandable.py --json     # one JSON object per line
    python3 benches/peers/torch_expandable.py --gib 2    # smaller: does it run?

Two things are measured, each in a process of its own and with either setting of `expandable_segments`, in turns:

* blocks: fresh blocks of 1 GiB (and of 20 MiB, up to 4 GiB), one after the other, kept, each followed by a wait for the
  device; then what `empty_cache` takes once they are dropped. Later repeats take memory that the process before gave
  back, which the driver may have to scrub: hence the pause between them, and the first repeat is told apart.
* cat: a tensor that grows to 4 GiB by `torch.cat` with 64 MiB at a time, and the most memory it held meanwhile.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time

MIB, GIB = 1 << 20, 1 << 30


def blocks(size, total):
    import torch

    torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    count = total // size
    held = []
    start = time.perf_counter()
    for _ in range(count):
        held.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
        torch.cuda.synchronize()
    grown = time.perf_counter()
    held.clear()
    torch.cuda.synchronize()
    dropped = time.perf_counter()
    torch.cuda.empty_cache()
    torch.cuda.synchronize()
    emptied = time.perf_counter()
    gib = count * size / GIB
    return {
        "grow, ms per GiB": (grown - start) * 1e3 / gib,
        "empty_cache, ms per GiB": (emptied - dropped) * 1e3 / gib,
    }


def cat(step, total):
    import torch

    part = torch.ones(step, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    whole = part.clone()
    while whole.numel() < total:
        whole = torch.cat([whole, part])
    torch.cuda.synchronize()
    took = time.perf_counter() - start
    size = whole.numel()
    # The part itself is the caller's.
    allocated = torch.cuda.max_memory_allocated() - step
    reserved = torch.cuda.max_memory_reserved() - step
    return {"grow, ms": took * 1e3, "peak allocated by size": allocated / size, "peak reserved by size": reserved / size}


def child(kind, size, total):
    print(json.dumps({"blocks": blocks, "cat": cat}[kind](size, total)))


def measure(kind, size, total, expandable):
    env = dict(os.environ)
    # The older name is understood by all versions; the newer one would override it.
    env.pop("PYTORCH_ALLOC_CONF", None)
    env["PYTORCH_CUDA_ALLOC_CONF"] = f"expandable_segments:{expandable}"
    command = [sys.executable, __file__, "--child", kind, str(size), str(total)]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines()
        raise RuntimeError(lines[-1] if lines else f"exit status {done.returncode}")
    return json.loads(done.stdout.splitlines()[-1])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON lines instead of a table")
    parser.add_argument("--gib", type=int, default=64, help="how far the blocks go (64)")
    parser.add_argument("--repeats", type=int, default=3, help="processes per case (3)")
    parser.add_argument("--pause", type=float, default=2.0, help="seconds between processes (2)")
    parser.add_argument("--child", nargs=3, metavar=("KIND", "SIZE", "TOTAL"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        return child(args.child[0], int(args.child[1]), int(args.child[2]))
    try:
        import torch
    except ImportError as error:
        print(f"skipped: {error}")
        return None
    # Without touching the card: a context of this process would take memory from its children.
    if torch.version.cuda is None:
        print(f"skipped: PyTorch {torch.__version__} is built without CUDA")
        return None
    total = args.gib * GIB
    cases = [
        (f"blocks of 1 GiB to {args.gib} GiB", "blocks", GIB, total),
        (f"blocks of 20 MiB to {min(args.gib, 4)} GiB", "blocks", 20 * MIB, min(total, 4 * GIB)),
        (f"torch.cat by 64 MiB to {min(args.gib, 4)} GiB", "cat", 64 * MIB, min(total, 4 * GIB)),
    ]
    if not args.json:
        print(f"PyTorch {torch.__version__}, medians of {args.repeats} processes, the first in brackets\n")
        print("| what | figure | expandable segments | without |\n|---|---|---|---|")
    for name, kind, size, end in cases:
        found = {True: [], False: []}
        try:
            for repeat in range(args.repeats):
                for expandable in (True, False) if repeat % 2 == 0 else (False, True):
                    found[expandable].append(measure(kind, size, end, expandable))
                    time.sleep(args.pause)
        except RuntimeError as error:
            print(json.dumps({"what": name, "failed": str(error)}) if args.json else f"| {name} | failed: {error} | | |")
            continue
        for figure in found[True][0]:
            values = {expandable: [run[figure] for run in runs] for expandable, runs in found.items()}
            if args.json:
                line = {"what": name, "figure": figure, "torch": torch.__version__}
                line |= {"expandable": values[True], "plain": values[False]}
                print(json.dumps(line))
                continue
            cells = [f"{statistics.median(runs):.2f} ({runs[0]:.2f})" for runs in (values[True], values[False])]
            print(f"| {name} | {figure} | {cells[0]} | {cells[1]} |")
        sys.stdout.flush()
    return None


if __name__ == "__main__":
    main()
