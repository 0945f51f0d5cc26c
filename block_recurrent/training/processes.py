"""Several processes as one run: how they find each other, and who does not fit or does not come.

Nothing here is a collective: facts go through the key-value store of JAX's coordination service, where a wait has an
end. So a process with another config, other code or other data is named within seconds, before any of them hangs.
"""

import contextlib
import hashlib
import importlib.util
import json
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import jax
from jax._src import clusters, distributed  # neither clusters nor the coordination service's client are public
from jax.experimental import multihost_utils

from block_recurrent.errors import UserError, first_line

PATIENCE = 120.0  # seconds
FAILURE = "failure"  # said instead of facts


def join(
    coordinator: str | None = None,
    processes: int | None = None,
    process: int | None = None,
    patience: float = PATIENCE,
) -> None:
    """Joins the other processes of a run: those that flags tell of, or those of a TPU slice or a Slurm job."""
    given = (coordinator, processes, process)
    if given == (None, None, None):
        if not in_cluster():
            return
        given = of_cluster(patience)
    elif None in given:
        raise UserError("--coordinator=HOST:PORT, --processes=N and --process=I go together")
    roll_call(*given, patience)
    jax.distributed.initialize(*given, initialization_timeout=max(int(patience), 10))


def in_cluster() -> bool:
    """Whether the environment says that there are several processes, without asking any network."""
    if int(os.environ.get("SLURM_NTASKS", "1")) > 1 and "SLURM_PROCID" in os.environ:
        return True
    chips = any(Path("/dev").glob("accel[0-9]*")) or any(Path("/dev/vfio").glob("[0-9]*"))
    return chips and importlib.util.find_spec("libtpu") is not None


def of_cluster(patience: float) -> tuple[str, int, int]:
    """Coordinator, number of processes and this one's number, as JAX knows them of TPU slices and Slurm."""
    known = [kind for kind in clusters.ClusterEnv._cluster_types if not kind.opt_in_only_method]
    cluster = next((kind for kind in known if kind.is_env_present()), None)
    if cluster is None:
        raise UserError(
            "this looks like one of several processes, but not what JAX knows: give --coordinator and so on"
        )
    try:  # a TPU slice looks for the coordinator's name, as long as it is given
        coordinator = cluster.get_coordinator_address(max(int(patience), 10), os.environ.get("JAX_COORDINATOR_PORT"))
    except RuntimeError as error:
        raise UserError(f"process 0 cannot be found: {first_line(error)}") from error
    return coordinator, cluster.get_process_count(), cluster.get_process_id()


def roll_call(coordinator: str, processes: int, process: int, patience: float) -> None:
    """Waits until all processes are there, or says which are not: JAX itself would abort without a word on them.

    Each calls process 0 on the port that JAX will use, says its number and of how many, and is told what is wrong.
    """
    host, _, port = coordinator.rpartition(":")
    if not host or not re.fullmatch(r"[0-9]{1,5}", port) or not 0 < int(port) < 2**16:
        raise UserError(f"--coordinator={coordinator}: give HOST:PORT")
    if not 0 <= process < processes:
        raise UserError(f"--process={process}: of {processes} processes the numbers are 0 to {processes - 1}")
    if process == 0:
        wrong = listen(int(port), processes, patience)
    else:
        wrong = call(host, int(port), f"{process} {processes}", patience)
    if wrong:
        raise UserError(wrong)


def listen(port: int, processes: int, patience: float) -> str:
    """Process 0: takes the calls, and tells the callers what is wrong, if anything is."""
    callers, wrong, until = {}, "", time.monotonic() + patience
    try:
        server = socket.create_server(("", port))
    except OSError as error:
        raise UserError(f"process 0 cannot listen on port {port}: {error.strerror}; another run here?") from error
    with server:
        while not wrong and len(callers) < processes - 1 and (left := until - time.monotonic()) > 0:
            server.settimeout(left)
            try:
                caller, _ = server.accept()
                caller.settimeout(5)
                number, count = map(int, caller.recv(32).split())
            except (OSError, ValueError):
                continue
            callers[number] = caller
            if count != processes:
                wrong = f"process {number} was told of {count} processes and process 0 of {processes}: start all alike"
        missing = [i for i in range(1, processes) if i not in callers]
        wrong = wrong or (absent(missing, processes, patience) if missing else "")
        for caller in callers.values():
            with contextlib.suppress(OSError), caller:
                caller.sendall(json.dumps(wrong).encode())
    return wrong


def call(host: str, port: int, number: str, patience: float) -> str:
    """Any other process: calls until it is answered."""
    until = time.monotonic() + patience
    while (left := until - time.monotonic()) > 0:
        try:
            with socket.create_connection((host, port), timeout=left) as line:
                line.sendall(number.encode())
                line.settimeout(until - time.monotonic() + 10)
                return json.loads(line.recv(1 << 16))
        except (OSError, ValueError):
            time.sleep(0.2)
    return absent([0], int(number.split()[1]), patience)


def absent(missing: list[int], processes: int, patience: float) -> str:
    names = ", ".join(map(str, missing))
    return f"process {names} of {processes} did not come within {patience:.0f} s: look at its log, or start it"


def client():
    """The store that all processes share, or None in a run of one."""
    return distributed.global_state.client


def code_version() -> str:
    """A hash of this project's source, so that it needs no git where it runs."""
    root, digest = Path(__file__).parents[2], hashlib.sha256()
    for folder in ("block_recurrent", "models"):
        for file in sorted((root / folder).rglob("*.py")):
            digest.update(f"{file.relative_to(root)}\n".encode() + file.read_bytes())
    return digest.hexdigest()[:12]


def agree(topic: str, facts: dict[str, str], patience: float = PATIENCE) -> None:
    """Checks that all processes have the same facts; otherwise each says which differs from process 0, and in what."""
    everyone = everyones(topic, facts, patience)
    for i, theirs in enumerate(everyone):
        if FAILURE in theirs:
            raise UserError(f"process {i} has failed: {theirs[FAILURE]}")
    for name in facts:
        for i, theirs in enumerate(everyone):
            if theirs.get(name) != everyone[0].get(name):
                raise UserError(
                    f"process {i} has another {name} than process 0: {theirs.get(name)} and not "
                    f"{everyone[0].get(name)}; start all processes alike"
                )


def everyones(topic: str, facts: dict[str, str], patience: float = PATIENCE) -> list[dict[str, str]]:
    """What each process says on a topic, once all have."""
    store = client()
    if store is None:
        return [facts]
    mine, count = distributed.global_state.process_id, distributed.global_state.num_processes
    store.key_value_set(f"block_recurrent/{topic}/{mine}", json.dumps(facts))
    return [json.loads(told(store, f"block_recurrent/{topic}/{i}", i, patience)) for i in range(count)]


@contextlib.contextmanager
def before_agreeing(topic: str) -> Iterator[None]:
    """Where a failure of one process is told to those that wait for it at `agree`."""
    try:
        yield
    except Exception as error:
        if client() is not None:
            key = f"block_recurrent/{topic}/{distributed.global_state.process_id}"
            client().key_value_set(key, json.dumps({FAILURE: first_line(error)}))
        raise


def told(store, key: str, process: int, patience: float) -> str:
    try:
        return store.blocking_key_value_get(key, int(1000 * patience))
    except Exception as error:
        raise UserError(f"process {process} did not come within {patience:.0f} s: look at its log") from error


def meet(place: str, patience: float = PATIENCE) -> None:
    """Waits until all processes are here: collectives on a CPU give up after half a minute without the others."""
    agree(place, {}, patience)


def preempted(place: int) -> bool:
    """Whether all processes, one of which has had SIGTERM, are to stop here; asked at every place, counted from 1."""
    return client() is not None and multihost_utils.reached_preemption_sync_point(place)


class Attendance:
    """Notes each process's step, and when one takes too long says which processes have not come as far."""

    def __init__(self, patience: float = PATIENCE):
        self.patience, self.step, self.noted, self.since = patience, -1, 0.0, time.monotonic()
        self.ended = threading.Event()
        if client() is not None:
            threading.Thread(target=self._watch, daemon=True).start()

    def at(self, step: int) -> None:
        self.step, self.since = step, time.monotonic()
        if client() is not None and (self.since - self.noted > 1.0):
            self._note()

    def _note(self) -> None:
        self.noted = time.monotonic()
        key = f"block_recurrent/step/{distributed.global_state.process_id}"
        client().key_value_set(key, str(self.step), allow_overwrite=True)

    def _watch(self) -> None:
        while not self.ended.wait(self.patience / 4):
            waited = time.monotonic() - self.since
            if self.since > self.noted and waited > self.patience / 4:
                self._note()  # the steps since the last note: without them, the wrong process would seem behind
            if waited > self.patience and (late := self._late()):
                print(f"waiting for {waited:.0f} s at step {self.step}: {late}", file=sys.stderr, flush=True)

    def _late(self) -> str:
        """Who has not come as far as the others; all that still run have noted where they wait."""
        entries = dict(client().key_value_dir_get("block_recurrent/step/"))
        steps = {int(key.rpartition("/")[2]): int(step) for key, step in entries.items()}
        absent = [i for i in range(distributed.global_state.num_processes) if i not in steps]
        behind = min(steps.values(), default=0)
        late = [f"process {i} is not there" for i in absent]
        if behind < max(steps.values(), default=0):
            late += [f"process {i} was last seen at step {step}" for i, step in steps.items() if step == behind]
        return ", ".join(late)

    def close(self) -> None:
        self.ended.set()
