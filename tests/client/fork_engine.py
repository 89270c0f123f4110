"""``python -m tests.client.fork_engine MODE SOCKET DAEMON_PID``: an engine that forks; 0 if all is well.

A process of its own, so that the forks take nothing of pytest along.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path

import numpy as np

from tests.client.harness import Engine, chain, mapped_arenas, until

MODE, SOCKET, DAEMON_PID = sys.argv[1], sys.argv[2], int(sys.argv[3])

CHILD_TIMEOUT_S = 60


def in_child(work: Callable[[], None]) -> int:
    """The child's pid; it ends with 0 if `work` returned."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        timer = threading.Timer(CHILD_TIMEOUT_S, lambda: os._exit(3))
        timer.daemon = True
        timer.start()
        work()
        code = 0
    except BaseException:
        traceback.print_exc()
    os._exit(code)


def wait(pid: int) -> None:
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0, f"the child ended with {os.waitstatus_to_exitcode(status)}"


def use(engine: Engine, name: str) -> None:
    keys = chain(f"{MODE} {name}", 6)
    result = engine.client.store(None, keys, engine.pages, range(6))
    assert result.committed == 6, result
    wanted = engine.rows(range(6))
    assert engine.client.lookup(f"{name}/1", keys).blocks == 6
    assert engine.client.load(f"{name}/1", keys, engine.pages, range(20, 26)).loaded == 6
    assert np.array_equal(engine.rows(range(20, 26)), wanted)


def arena_files() -> int:
    found = 0
    for fd in os.listdir("/proc/self/fd"):
        try:
            found += ".arena" in os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            continue
    return found


def locks() -> set[str]:
    return {path.name for path in (Path(SOCKET).parent / "engines").iterdir()}


def unused(engine: Engine) -> None:
    """Only the child uses it."""
    wait(in_child(lambda: use(engine, "child")))
    use(engine, "parent")


def used(engine: Engine) -> None:
    """Parent, child and grandchild use it, each under an id of its own."""
    use(engine, "parent")
    mine = locks()
    assert len(mine) == 1

    def grandchild() -> None:
        use(engine, "grandchild")

    def child() -> None:
        assert mapped_arenas() == [], "the child inherits the mapping"
        assert arena_files() == 0, "the child inherits the arena's flock"
        assert engine.client.stats().lookups == 0
        use(engine, "child")
        assert len(locks()) == 2
        assert mine < locks()
        wait(in_child(grandchild))
        use(engine, "child again")
        engine.client.close()

    wait(in_child(child))
    assert mine <= locks(), "the child took the parent's lock away"
    use(engine, "parent again")
    wait(in_child(lambda: None))  # a child that does nothing leaves the parent alone
    use(engine, "parent at last")
    until(lambda: locks() == mine, "the dead children's locks are removed")


def busy(engine: Engine) -> None:
    """Forks while other threads are in calls and copies."""
    stop = threading.Event()
    failures: list[BaseException] = []

    def hammer(number: int) -> None:
        own = Engine(SOCKET)
        try:
            count = 0
            while not stop.is_set():
                count += 1
                use(own, f"thread {number} {count}")
        except BaseException as error:
            failures.append(error)
        finally:
            own.close()

    threads = [threading.Thread(target=hammer, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for number in range(8):
        wait(in_child(lambda number=number: use(engine, f"child {number}")))
    stop.set()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    use(engine, "parent")


def is_waiting(engine: Engine) -> bool:
    """Whether one of its connections is in a call."""
    wire = engine.client._link.wire
    return len(wire._all) > len(wire._idle)


def stuck(engine: Engine) -> None:
    """A call hangs while the process forks: that disturbs neither fork nor child nor the call."""
    use(engine, "parent")
    patient = Engine(SOCKET, lookup_timeout_s=600.0)
    assert patient.client.prepare()
    os.kill(DAEMON_PID, signal.SIGSTOP)
    reasons: list[str] = []
    thread = threading.Thread(
        target=lambda: reasons.append(patient.client.lookup("h/1", chain("none", 1)).reason)
    )
    thread.start()
    until(lambda: is_waiting(patient), "the call hangs")

    def child() -> None:
        os.kill(DAEMON_PID, signal.SIGCONT)
        use(patient, "child")

    wait(in_child(child))
    thread.join(60)
    assert reasons == ["missing"]
    patient.close()


def main() -> None:
    engine = Engine(SOCKET)
    {"unused": unused, "used": used, "busy": busy, "stuck": stuck}[MODE](engine)
    engine.close()
    assert not [name for name in locks() if name.startswith(f"e{os.getpid()}-")]


if __name__ == "__main__":
    main()
