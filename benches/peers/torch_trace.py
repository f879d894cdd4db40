#!/usr/bin/env python3
"""Records what training a small transformer allocates on a CUDA card, and what PyTorch's own allocator makes of it.

    python3 benches/peers/torch_trace.py trace.txt             # record, then replay with PyTorch's allocator
    python3 benches/peers/torch_trace.py trace.txt --steps 20  # shorter
    cargo bench --bench allocator -- --device cuda:0 --only trace --trace trace.txt

The trace is text, an event a line: `a NUMBER BYTES` allocates a block, `f NUMBER` frees it. The sizes are those asked for.
Sequence lengths vary from step to step, as they do in practice: that is what fragments memory.

Then the trace is replayed with PyTorch's caching allocator, with expandable segments and without, each in a process of its
own: twice, the second time with what the first left cached. A comment line of the trace says what came out:

    # native: reserved_peak=BYTES ns_per_op=NS cold_ns_per_op=NS

The time is that of the raw calls from Python, less that of the same loop with a call that does nothing.
"""

import argparse
import os
import random
import subprocess
import sys
import time


def record(steps, seed):
    """The memory events of a training run, and the peaks that PyTorch counted."""
    import torch
    from torch import nn

    torch.manual_seed(seed)
    random.seed(seed)
    torch.cuda.memory._record_memory_history(enabled="all", context=None, max_entries=10_000_000)
    width, layers, vocabulary, batch = 1024, 12, 32_000, 8
    embed = nn.Embedding(vocabulary, width, device="cuda")
    layer = nn.TransformerEncoderLayer(width, 16, 4 * width, dropout=0.1, batch_first=True, norm_first=True, device="cuda")
    body = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
    head = nn.Linear(width, vocabulary, bias=False, device="cuda")
    parameters = [*embed.parameters(), *body.parameters(), *head.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=1e-4)
    for step in range(steps):
        length = min(2048, max(64, int(random.lognormvariate(6.2, 0.7))))
        tokens = torch.randint(vocabulary, (batch, length + 1), device="cuda")
        with torch.autocast("cuda", dtype=torch.bfloat16):
            logits = head(body(embed(tokens[:, :-1])))
            loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 10 == 9:
            print(f"step {step + 1} of {steps}, length {length}, loss {loss.item():.3f}", file=sys.stderr)
    torch.cuda.synchronize()
    stats = torch.cuda.memory_stats()
    peaks = stats["requested_bytes.all.peak"], stats["allocated_bytes.all.peak"], stats["reserved_bytes.all.peak"]
    return torch.cuda.memory._snapshot()["device_traces"][torch.cuda.current_device()], peaks


def write(path, events, peaks, steps):
    """Writes the trace: each block with a number of its own. Returns how many events."""
    lines = [f"# training, {steps} steps; peaks: requested {peaks[0]}, allocated {peaks[1]}, reserved {peaks[2]}"]
    numbers, count = {}, 0
    for event in events:
        # A block that work on another stream may still use is freed when that is over: `free_completed`.
        if event["action"] == "alloc":
            numbers[event["addr"]] = count
            lines.append(f"a {count} {event['size']}")
            count += 1
        elif event["action"] == "free_completed" and event["addr"] in numbers:
            lines.append(f"f {numbers.pop(event['addr'])}")
    with open(path, "w") as file:
        file.write("\n".join(lines) + "\n")
    return len(lines) - 1


def parse(path):
    events = []
    with open(path) as file:
        for line in file:
            words = line.split()
            if words and words[0] in "af":
                events.append((int(words[1]), int(words[2]) if words[0] == "a" else -1))
    return events


def replay(path):
    """Replays a trace with PyTorch's allocator: the peak it reserved, and nanoseconds an event, warm and cold."""
    import torch

    torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    stream = torch.cuda.current_stream().cuda_stream
    events = parse(path)
    alloc, delete = torch._C._cuda_cudaCachingAllocator_raw_alloc, torch._C._cuda_cudaCachingAllocator_raw_delete

    def run(alloc, delete):
        live = {}
        start = time.perf_counter()
        for number, size in events:
            if size >= 0:
                live[number] = alloc(size, stream)
            else:
                delete(live.pop(number))
        took = time.perf_counter() - start
        for pointer in live.values():
            delete(pointer)
        return took

    idle = min(run(lambda size, stream: 1, lambda pointer: None) for _ in range(5))
    cold = run(alloc, delete)
    reserved = torch.cuda.memory_stats()["reserved_bytes.all.peak"]
    warm = sorted(run(alloc, delete) for _ in range(5))[2]
    per = 1e9 / max(1, len(events))
    return reserved, max(0.0, warm - idle) * per, max(0.0, cold - idle) * per


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", help="the file to write")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--replay", action="store_true", help="only replay a trace that is there, with the settings as they are")
    arguments = parser.parse_args()
    try:
        import torch
    except ImportError as error:
        sys.exit(f"skipped: {error}")
    if not torch.cuda.is_available():
        sys.exit("skipped: PyTorch finds no CUDA card")
    if arguments.replay:
        print("reserved_peak={} ns_per_op={:.1f} cold_ns_per_op={:.1f}".format(*replay(arguments.trace)))
        return
    events, peaks = record(arguments.steps, arguments.seed)
    count = write(arguments.trace, events, peaks, arguments.steps)
    print(f"{count} events; at the peak {peaks[0] / 2**30:.3f} GiB asked for, {peaks[2] / 2**30:.3f} GiB reserved")
    del events
    torch.cuda.empty_cache()
    comments = []
    for name, setting in (("native", "expandable_segments:False"), ("expandable", "expandable_segments:True")):
        environment = dict(os.environ, PYTORCH_CUDA_ALLOC_CONF=setting, PYTORCH_ALLOC_CONF=setting)
        command = [sys.executable, os.path.abspath(__file__), arguments.trace, "--replay"]
        result = subprocess.run(command, env=environment, capture_output=True, text=True)
        if result.returncode != 0:
            sys.exit(f"replaying ({name}) failed:\n{result.stdout}{result.stderr}")
        comments.append(f"# {name}: {result.stdout.split(chr(10))[0]}")
        print(comments[-1])
    with open(arguments.trace, "a") as file:
        file.write("\n".join(comments) + "\n")


if __name__ == "__main__":
    main()
