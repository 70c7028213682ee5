"""Ranks of one start agree on a store that knows nothing of earlier starts."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from flagscale.train.rendezvous import rendezvous, store_of_this_start

WORLD = 4


def start(port: int) -> list[dist.PrefixStore]:
    """The stores of all ranks of one start; a client each, as in processes of their own."""

    def one(rank: int) -> dist.PrefixStore:
        client = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
        return store_of_this_start(client, rank, WORLD)

    with ThreadPoolExecutor(WORLD) as pool:
        return list(pool.map(one, range(WORLD)))


def test_starts_do_not_meet() -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    stores = start(server.port)
    stores[0].set("address", "dead")
    assert {store.get("address") for store in stores} == {b"dead"}
    # A rank that died while it said hello, and one that the next start never sees.
    server.set("hello/1", "a number that nobody waits for")
    again = start(server.port)
    assert not any(store.check(["address"]) for store in again)
    again[3].set("address", "alive")
    assert {store.get("address") for store in again} == {b"alive"}


def test_without_restarts_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "0")
    assert rendezvous() == {}
