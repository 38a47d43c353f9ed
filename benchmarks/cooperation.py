"""What cooperating drafters gain: `python -m benchmarks.cooperation --parts ladder ablation testbed scale straggler`.

ladder     8 expert drafters and one target as real actors: a random drafter, routed by expertise, with fusion of three,
           with trees, with drafting ahead; beside an oracle that knows the experts, and beside the simulator.
ablation   simulated: what is lost without each, by how many are served at once, with own and with shared errors.
testbed    simulated: CoSine's cluster, beside policies of other systems on the same machines.
scale      simulated: 1 to 64 drafters per verifier, 1,000 replicas; the router alone with up to 10,000.
straggler  real actors: one of three fused drafters becomes slow, another is killed, in the middle of an answer.

Exit code 1 where a figure falls short of its target. docs/benchmarks.md says how each figure is measured.
"""

import argparse
import asyncio
import os
import sys

from benchmarks.cooperation_ablation import ablation
from benchmarks.cooperation_ladder import ladder
from benchmarks.cooperation_scale import scale
from benchmarks.cooperation_straggler import straggler
from benchmarks.cooperation_testbed import testbed
from benchmarks.report import Report

PARTS = ("ladder", "ablation", "testbed", "scale", "straggler")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--streams", type=int, nargs="+", default=[1], help="concurrencies of the ladder")
    parser.add_argument("--seeds", type=int, default=3, help="of the testbed")
    arguments = parser.parse_args()
    report = Report()
    print(f"machine: {len(os.sched_getaffinity(0))} CPUs, load {os.getloadavg()[0]:.1f}")
    if "ablation" in arguments.parts:
        ablation(report)
    if "testbed" in arguments.parts:
        testbed(report, arguments.seeds)
    if "scale" in arguments.parts:
        scale(report)
    if "ladder" in arguments.parts:
        for concurrency in arguments.streams:
            asyncio.run(ladder(report, concurrency))
    if "straggler" in arguments.parts:
        asyncio.run(straggler(report))
    sys.exit(int(report.short))


if __name__ == "__main__":
    main()
