"""One rank of a world of processes that share memory and run the collective kernel, each on an emulated device of its own.

torchrun --standalone --nproc-per-node 4 -m tests.emulator.torchrun_worker ROUNDS
"""

from __future__ import annotations

import os
import sys

# Ranks wait for each other in turns on a few cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist

import emulator
from collectives.heap import SymmetricHeap
from collectives.rendezvous import StoreRendezvous
from collectives.transports.select import select
from tests.emulator.world import HIDDEN, World, expected

TARGET = "sm_100a"


def main(rounds: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    rendezvous = StoreRendezvous.of_group(None)
    chosen = select("shm", "cpu", rendezvous)
    heap = SymmetricHeap(chosen.transport, rendezvous)
    with emulator.device(TARGET, schedule="random", seed=rank) as device:
        world = World(device, TARGET, size)
        buffer = heap.allocate(world.layout.nbytes, "emulated", torch.bfloat16, world.layout.slot_bytes)
        world.peers = buffer.peers
        for i in range(size):
            device.register(buffer.view(i), f"shared buffer of rank {i}", foreign=True)
        good = 0
        for i in range(rounds):
            given = world.inputs(i)
            out = torch.full((1, HIDDEN), float("nan"), dtype=torch.bfloat16)
            world.call(rank, given[rank], out, None)
            good += torch.equal(out, expected(given))
        print(
            f"rank {rank}: {good} of {rounds} rounds right, record {world.ranks[rank].record[:2].tolist()}",
            flush=True,
        )
    dist.barrier()
    heap.close(collective=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]))
