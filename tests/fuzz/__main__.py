"""`python -m tests.fuzz`: draws, and a table of how the draws ended."""

import argparse
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator

from . import calling, celling, workers
from .verdict import FAULT, Outcome


def main() -> int:
    """Ends with 1 where any draw ended in a fault."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--calls", type=int, default=20_000)
    parser.add_argument("--cells", type=int, default=1_000)
    parser.add_argument("--compiled", type=int, default=24, help="cells that a backend runs, too")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--only", help="one draw, as a fault names it: calls:1234")
    parser.add_argument("--first", type=int, default=0, help="the number of the first draw")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--small", action="store_true", help="calls of two cells in float32 only")
    given = parser.parse_args()
    if given.only:
        kind, number = given.only.split(":")
        wanted = {"calls": [], "cells": [], "compiled": [], kind: [int(number)]}
    else:
        wanted = {
            "calls": list(range(given.first, given.first + given.calls)),
            "cells": list(range(given.first, given.first + given.cells)),
            "compiled": list(range(given.first, given.first + given.compiled)),
        }
    found: list[Outcome] = []
    began = time.monotonic()
    try:
        for outcome in outcomes(given, wanted):
            found.append(outcome)
            if given.only:
                print(outcome, "\n   ", outcome.plan)
            elif len(found) % 500 == 0:
                faults = sum(one.verdict == FAULT for one in found)
                words = f"{len(found)} draws, {faults} faults, {time.monotonic() - began:.0f} s"
                print(words, file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        print("interrupted: what was drawn so far", file=sys.stderr)
    return report(found, given)


def outcomes(given: argparse.Namespace, wanted: dict[str, list[int]]) -> Iterator[Outcome]:
    """How the draws of each kind end, in no order."""
    for kind, draw in draws(given).items():
        if kind == "calls" and wanted[kind] and given.device == "cpu":
            # in a fork: autograd may start threads, after which no fork of this process can use it
            workers.apart(calling.warm, given.small)
        yield from workers.run(kind, draw, wanted[kind], given.jobs)


def draws(given: argparse.Namespace) -> dict[str, workers.Draw]:
    """The draw of each kind."""
    backend = "cpu" if given.device == "cpu" else "fused"
    return {
        "calls": calling.check(given.seed, given.device, given.small),
        "cells": celling.check(given.seed),
        "compiled": celling.check(given.seed, layers=True, backend=backend),
    }


def grouped(faults: list[Outcome]) -> dict[str, list[Outcome]]:
    """Faults by signature and by what is odd; one with more oddities joins one with fewer."""
    groups: dict[tuple[str, frozenset[str]], list[Outcome]] = {}
    for fault in sorted(faults, key=lambda one: len(one.odd)):
        for (name, odd), members in groups.items():
            if name == fault.signature and odd <= fault.odd and (odd or not fault.odd):
                members.append(fault)
                break
        else:
            groups[fault.signature, fault.odd] = [fault]
    return {
        f"{name} [{' '.join(sorted(odd))}]" if odd else name: members
        for (name, odd), members in groups.items()
    }


def report(found: list[Outcome], given: argparse.Namespace) -> int:
    """Faults by signature with how to see each again, then the table."""
    groups = grouped([one for one in found if one.verdict == FAULT])
    more = f" --seed {given.seed} --device {given.device}" + " --small" * given.small
    for name, members in sorted(groups.items(), key=lambda pair: -len(pair[1])):
        first = min(members, key=lambda one: (len(one.odd), len(one.plan)))
        print(f"\nFAULT x {len(members)}: {name}\n  {first.words[:400]}\n  {first.plan}")
        print(f"  python -m tests.fuzz --only {first.kind}:{first.index}{more}")
    print()
    for kind in dict.fromkeys(one.kind for one in found):
        counts = Counter(one.verdict for one in found if one.kind == kind)
        words = ", ".join(f"{counts[verdict]} {verdict}" for verdict in sorted(counts))
        print(f"{kind}: {sum(counts.values())} draws: {words}")
    refused = Counter(
        one.words.split(":")[0] for one in found if one.kind != "calls" and one.verdict == "refused"
    )
    if refused:
        print("operators of refused cells:", ", ".join(f"{n} {k}" for n, k in refused.items()))
    print(f"{len(groups)} kinds of fault" if groups else "no fault")
    return 1 if groups else 0


if __name__ == "__main__":
    multiprocessing.set_start_method("fork")
    sys.exit(main())
