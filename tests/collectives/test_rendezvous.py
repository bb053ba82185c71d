"""How ranks meet: order of values, timeouts that name the missing, new generations after a failure."""

from __future__ import annotations

import pickle
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from collectives import errors
from collectives.errors import CollectiveError, CollectiveTimeout, RendezvousTimeout, SymmetricMismatch
from collectives.rendezvous import SoloRendezvous, StoreRendezvous, ThreadRendezvous
from tests.collectives.conftest import in_threads

pytestmark = pytest.mark.cpu


@pytest.fixture
def server() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def client(server: dist.TCPStore) -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", server.port, is_master=False)


def file_store(tmp_path: Path, n: int) -> dist.FileStore:
    return dist.FileStore(str(tmp_path / "store"), n)


@pytest.mark.parametrize("kind", ["threads", "tcp", "file"])
def test_values_come_in_rank_order_meeting_after_meeting(
    kind: str, server: dist.TCPStore, tmp_path: Path
) -> None:
    n, rounds = 3, 20
    threads = ThreadRendezvous.world(n)

    def of_rank(rank: int) -> list[list[object]]:
        if kind == "threads":
            meeting = threads[rank]
        else:
            store = client(server) if kind == "tcp" else file_store(tmp_path, n)
            meeting = StoreRendezvous(store, rank, n, "scope")
        return [meeting.all_gather((rank, i, b"\x00\xff")) for i in range(rounds)]

    for result in in_threads(n, of_rank):
        assert result == [[(r, i, b"\x00\xff") for r in range(n)] for i in range(rounds)]


def test_a_store_does_not_fill_up(server: dist.TCPStore) -> None:
    n = 2

    def of_rank(rank: int) -> int:
        meeting = StoreRendezvous(client(server), rank, n, "scope")
        for _ in range(50):
            meeting.barrier()
        return 0

    before = server.num_keys()
    assert in_threads(n, of_rank) == [0, 0]
    assert server.num_keys() - before <= 2 * n


@pytest.mark.parametrize("kind", ["threads", "tcp"])
def test_who_does_not_come_is_named(kind: str, server: dist.TCPStore) -> None:
    n, threads = 4, ThreadRendezvous.world(4)

    def of_rank(rank: int) -> object:
        if rank in (1, 3):
            return None
        meeting = threads[rank] if kind == "threads" else StoreRendezvous(client(server), rank, n, "scope")
        start = time.monotonic()
        with pytest.raises(RendezvousTimeout) as caught:
            meeting.all_gather("here", 0.3, "the test")
        assert 0.3 <= time.monotonic() - start < 5
        assert meeting.broken
        start = time.monotonic()
        with pytest.raises(CollectiveError, match="no the next: rank"):
            meeting.barrier(30, "the next")
        assert time.monotonic() - start < 1
        return caught.value.rank, caught.value.missing, str(caught.value)

    results = in_threads(n, of_rank)
    assert results[0] == (0, [1, 3], "rank 0: ranks 1 and 3 did not come to the test in 0.3 s")
    assert results[2][1] == [1, 3]


def test_a_lost_store_is_an_error_of_the_package(tmp_path: Path) -> None:
    script = (
        "import sys, torch.distributed as dist\n"
        "s = dist.TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False)\n"
        "print(s.port, flush=True); sys.stdin.read()\n"
    )
    server = subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert server.stdout is not None
    store = dist.TCPStore("127.0.0.1", int(server.stdout.readline()), is_master=False)
    meeting = StoreRendezvous(store, 0, 2, "scope")
    server.kill()
    server.wait()
    with pytest.raises(CollectiveError, match="the store failed"):
        meeting.barrier(5)


def test_solo_answers_for_everybody() -> None:
    assert SoloRendezvous(1, 3).all_gather("x") == ["x"] * 3


@pytest.mark.parametrize(("rank", "world_size"), [(2, 2), (-1, 2), (0, 0)])
def test_impossible_ranks_are_refused(rank: int, world_size: int, server: dist.TCPStore) -> None:
    with pytest.raises(ValueError, match=f"rank: got {rank} of {world_size}"):
        SoloRendezvous(rank, world_size)
    with pytest.raises(ValueError, match=f"rank: got {rank} of {world_size}"):
        StoreRendezvous.join(client(server), rank, world_size)


def test_a_group_has_to_be_there() -> None:
    assert not dist.is_initialized()
    with pytest.raises(ValueError, match="init_process_group"):
        StoreRendezvous.of_group()


def test_a_group_is_met_at_its_store(monkeypatch: pytest.MonkeyPatch) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert StoreRendezvous.of_group().all_gather("x") == ["x"]
        world = dist.group.WORLD
        assert world is not None
        if hasattr(world, "get_group_store"):  # and without it, as in older versions of torch
            monkeypatch.delattr(dist.ProcessGroup, "get_group_store")
            assert StoreRendezvous.of_group(world).all_gather("y") == ["y"]
        monkeypatch.undo()
        store = world.get_group_store() if hasattr(world, "get_group_store") else None
        found = None if store is None else store.get("flashnext/process group/generation")
        assert found in (None, b"2")  # both found the same store
        with pytest.raises(ValueError, match="group: got one without this process"):
            StoreRendezvous.of_group(dist.GroupMember.NON_GROUP_MEMBER)  # type: ignore[arg-type]
    finally:
        dist.destroy_process_group()


class TestJoin:
    def test_generations_count_up(self, server: dist.TCPStore) -> None:
        def of_rank(rank: int) -> list[object]:
            store, met = client(server), []
            for i in range(3):
                meeting = StoreRendezvous.join(store, rank, 3, 10)
                met.append((meeting.generation, meeting.all_gather((rank, i), 10)))
            return met

        for result in in_threads(3, of_rank):
            assert result == [(i + 1, [(r, i) for r in range(3)]) for i in range(3)]

    def test_two_names_do_not_meet(self, server: dist.TCPStore) -> None:
        def of_rank(rank: int) -> object:
            return StoreRendezvous.join(client(server), rank, 2, 0.5, name=f"name {rank}")

        results = in_threads(2, of_rank)
        assert [(type(r), r.missing) for r in results] == [(RendezvousTimeout, [1]), (RendezvousTimeout, [0])]

    def test_who_gave_up_is_not_counted_on(self, server: dist.TCPStore) -> None:
        with pytest.raises(RendezvousTimeout) as caught:
            StoreRendezvous.join(client(server), 0, 2, 0.1)
        assert caught.value.missing == [1]
        with pytest.raises(RendezvousTimeout) as caught:
            StoreRendezvous.join(client(server), 1, 2, 0.1)
        assert caught.value.missing == [0]
        meetings = in_threads(2, lambda rank: StoreRendezvous.join(client(server), rank, 2, 10))
        assert [m.generation for m in meetings] == [1, 1]

    def test_a_roster_sealed_with_a_dead_process_costs_one_generation(self, server: dist.TCPStore) -> None:
        store = client(server)
        store.set("flashnext/communicator/1/arrived/1", "of a dead process")
        early = StoreRendezvous.join(store, 0, 2, 10)  # meets the dead one's arrival
        assert early.generation == 1

        def of_rank(rank: int) -> object:
            if rank == 1:
                return StoreRendezvous.join(client(server), 1, 2, 10).all_gather("b", 10)
            with pytest.raises(RendezvousTimeout) as caught:
                early.barrier(0.3)
            assert caught.value.missing == [1]
            return StoreRendezvous.join(client(server), 0, 2, 10).all_gather("a", 10)

        assert in_threads(2, of_rank) == [["a", "b"]] * 2

    def test_who_is_not_in_the_roster_goes_on_to_the_next_generation(self, server: dist.TCPStore) -> None:
        """A restarted process reads the generation, and only then is the roster sealed, with the dead one."""
        store = client(server)

        class Late:
            """Rank 1's store: rank 0 meets the dead process right after rank 1 has read the generation."""

            def __init__(self) -> None:
                self.met: StoreRendezvous | None = None

            def __getattr__(self, name: str) -> object:
                return getattr(store, name)

            def compare_set(self, key: str, expected: str, desired: str) -> bytes:
                value: bytes = store.compare_set(key, expected, desired)
                if self.met is None:
                    store.set("flashnext/communicator/1/arrived/1", "of a dead process")
                    self.met = StoreRendezvous.join(client(server), 0, 2, 10)
                return value

        late = Late()

        def of_rank(rank: int) -> int:
            if rank == 1:
                return StoreRendezvous.join(late, 1, 2, 10).generation  # type: ignore[arg-type]
            while late.met is None:
                time.sleep(0.01)
            return StoreRendezvous.join(client(server), 0, 2, 10).generation

        assert in_threads(2, of_rank) == [2, 2]


@pytest.mark.parametrize(
    "error",
    [
        CollectiveTimeout(0, [3, 1], 7),
        RendezvousTimeout(0, [1], "x", 1.0),
        SymmetricMismatch("m", [1]),
        errors.TransportUnavailable("why"),
    ],
    ids=lambda e: type(e).__name__,
)
def test_errors_travel_between_processes(error: CollectiveError) -> None:
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert vars(again) == vars(error)


def test_a_timeout_says_who() -> None:
    error = CollectiveTimeout(2, [3, 1, 0], 41)
    assert (error.rank, error.missing, error.epoch) == (2, [0, 1, 3], 41)
    assert str(error) == "rank 2: ranks 0, 1 and 3 did not arrive in round 41"
