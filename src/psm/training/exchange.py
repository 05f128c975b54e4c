"""What the processes of a run tell each other before a process group joins them.

Rank 0 holds the folder and decides: configuration, where to resume. The others receive its decision from it, get ready
and say so; a mistake that any of them finds ends all of them.
"""

import itertools
import json
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from psm.training.distributed import CHILD
from psm.training.launch import Launch
from psm.utils.errors import UserError

log = logging.getLogger("psm")

PATIENCE = 10.0  # seconds until a process says what it waits for
LEAVE = 5.0  # seconds that rank 0 stays for the others to read why it ends
_runs = itertools.count()  # several runs may follow each other in a process


class Exchange:
    """Messages through torch's key-value store, which rank 0 or torchrun's agent serves. With one process: nothing."""

    def __init__(self, launch: Launch, timeout: float):
        """Meet the other processes.

        Args:
            launch: How the processes were started.
            timeout: Seconds to wait for another process before giving up.

        Raises:
            UserError: Rank 0 is not there within that time.
        """
        self.rank, self.world, self.timeout = launch.rank, launch.world, timeout
        self.place = ""
        if self.world == 1:
            return
        host, port = launch.address()
        self.place = f"{host}:{port}"
        served = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        try:
            store = dist.TCPStore(
                host,
                port,
                is_master=self.rank == 0 and not served,
                timeout=timedelta(seconds=timeout),
                wait_for_workers=False,
                multi_tenant=True,  # the process group will listen at the same port
            )
        except RuntimeError as error:
            if self.rank == 0:
                raise UserError(f"rank 0 cannot listen at {self.place}: {_first_line(error)}") from None
            raise UserError(
                f"rank {self.rank} of {self.world} found no rank 0 at {self.place} within {timeout:g} s: start all "
                "processes, and check that this host reaches that port."
            ) from None
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self.store = dist.PrefixStore(f"psm/{attempt}/{next(_runs)}", store)

    @contextmanager
    def deciding(self) -> Iterator[None]:
        """On rank 0, around all that comes before the start: what goes wrong there ends the others too."""
        try:
            yield
        except BaseException as error:
            if self.world > 1:
                self._send("decision", {"error": str(error) or type(error).__name__})
                self._send("start", {"error": str(error) or type(error).__name__})
                with suppress(UserError):
                    self._wait([f"left/{rank}" for rank in range(1, self.world)], min(LEAVE, self.timeout))
            raise

    def decide(self, decision: dict[str, Any]) -> None:
        """On rank 0: tell the others what is to be done, and wait until all are ready for it."""
        if self.world == 1:
            return
        self._send("decision", decision)
        others = range(1, self.world)
        self._wait([f"ready/{rank}" for rank in others], self.timeout)
        for rank in others:
            if problem := json.loads(self.store.get(f"ready/{rank}"))["error"]:
                raise UserError(f"rank {rank}: {problem}")

    def start(self) -> None:
        """On rank 0: the folder is ready, training begins."""
        if self.world > 1:
            self._send("start", {})

    def decision(self) -> dict[str, Any]:
        """On the others: what rank 0 has decided."""
        return self._receive("decision")

    @contextmanager
    def getting_ready(self) -> Iterator[None]:
        """On the others, around their preparations: rank 0 learns how it went, and the start is awaited."""
        try:
            yield
        except BaseException as error:
            self._send(f"ready/{self.rank}", {"error": str(error) or type(error).__name__})
            self._send(f"left/{self.rank}", {})
            raise
        self._send(f"ready/{self.rank}", {"error": ""})
        self._receive("start")

    def _send(self, name: str, message: dict[str, Any]) -> None:
        with suppress(RuntimeError):  # nobody listens any more
            self.store.set(name, json.dumps(message))

    def _receive(self, name: str) -> dict[str, Any]:
        self._wait([name], self.timeout)
        with self._ended_rank_0():
            message = json.loads(self.store.get(name))
        if "error" in message:
            self._send(f"left/{self.rank}", {})
            raise UserError(message["error"])
        return message

    def _wait(self, names: list[str], timeout: float) -> None:
        """Wait for messages, and say which ones are missing when that takes long."""
        began, told = time.monotonic(), False
        while True:
            with self._ended_rank_0(), suppress(dist.DistStoreError):  # the latter: not yet
                self.store.wait(names, timedelta(seconds=min(1.0, timeout)))
                return
            waited = time.monotonic() - began
            with self._ended_rank_0():
                missing = [name for name in names if not self.store.check([name])]
            if waited > timeout:
                raise UserError(
                    f"{self._missing(missing)} within {timeout:g} s: see ddp.timeout and the other outputs."
                )
            if waited > PATIENCE and not told:
                log.warning("rank %d: %s yet (at most %g s)", self.rank, self._missing(missing), timeout)
                told = True

    @contextmanager
    def _ended_rank_0(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError:  # also of torch's own kinds
            raise UserError(f"rank 0 at {self.place} has ended: see its output.") from None

    def _missing(self, names: list[str]) -> str:
        if self.rank:
            return f"nothing heard from rank 0 at {self.place}"
        ranks = [name.partition("/")[2] for name in names]
        some = ", ".join(ranks[:8]) + (", ..." if len(ranks) > 8 else "")
        return f"{len(ranks)} of {self.world} processes (rank {some}) have not come to {self.place}"


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


@contextmanager
def handed_down(decision: dict[str, Any]) -> Iterator[None]:
    """Give a decision to the processes that Lightning starts from this one."""
    os.environ[CHILD] = f"{os.getpid()}:{json.dumps(decision)}"
    try:
        yield
    finally:
        os.environ.pop(CHILD, None)


def inherited() -> dict[str, Any] | None:
    """The decision that the process which started this one has handed down; None where there is none."""
    parent, _, decision = os.environ.get(CHILD, "").partition(":")
    return json.loads(decision) if decision and int(parent) == os.getppid() else None
