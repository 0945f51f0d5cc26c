"""A gcloud without a cloud: logs its arguments, replays scripted states, and runs ssh commands in sandbox folders.

Everything lies in the folder FAKE_CLOUD: log.jsonl (the arguments of every call), cloud.json (the resources, the
scripts of those to come, and answers for other commands), a folder per node and worker as its home, and buckets/.
A script is a list of states; each `describe` goes on to the next, except where `until` names a file that is not there
yet. A step may `signal` the runs and then `touch` a file; `ended` waits for the runs' exit codes.
"""

import contextlib
import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

CLOUD = Path(os.environ.get("FAKE_CLOUD", "unset"))


def main(arguments: list[str]) -> None:
    with open(CLOUD / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with open(CLOUD / "log.jsonl", "a") as log:
            log.write(json.dumps(arguments) + "\n")
        cloud = json.loads((CLOUD / "cloud.json").read_text())
        words = [word for word in arguments if not word.startswith("-")]
        flags = dict(
            re.fullmatch(r"--([\w-]+)=?(.*)", word, re.DOTALL).groups() for word in arguments if word[:2] == "--"
        )
        if words[:3] == ["compute", "tpus", "queued-resources"]:
            told = globals()[words[3]](cloud, words[4], flags)
        elif words[:1] == ["storage"]:
            told = storage(*words[1:])
        else:
            told = answer(cloud, " ".join(words))
        (CLOUD / "cloud.partial").write_text(json.dumps(cloud, indent=1))
        (CLOUD / "cloud.partial").replace(CLOUD / "cloud.json")
    print(told, end="")


def fail(text: str) -> None:
    sys.exit(f"ERROR: (gcloud) {text}")


def found(cloud: dict, name: str) -> dict:
    if name not in cloud["resources"]:
        fail(f"NOT_FOUND: Resource 'queuedResources/{name}' was not found")
    return cloud["resources"][name]


def create(cloud: dict, name: str, flags: dict) -> str:
    if name in cloud["resources"]:
        fail(f"ALREADY_EXISTS: Resource '{name}' already exists")
    script = cloud["scripts"].pop(0) if cloud["scripts"] else ["ACTIVE"]
    if isinstance(script, str):
        fail(script)
    chips = int(flags["accelerator-type"].rpartition("-")[2])
    nodes = [flags["node-id"]] if "node-id" in flags else [f"{name}-{i}" for i in range(int(flags["node-count"]))]
    labels = dict(pair.split("=") for pair in flags["labels"].split(","))
    hosts = 1 if chips <= 8 else chips // 4  # of v5e
    cloud["resources"][name] = {"script": script, "labels": labels, "nodes": nodes, "hosts": hosts}
    return ""


def state(resource: dict) -> dict:
    return step if isinstance(step := resource["script"][0], dict) else {"state": step}


def describe(cloud: dict, name: str, flags: dict) -> str:
    resource = found(cloud, name)
    now = state(resource)
    blocked = ("until" in now and not Path(now["until"]).exists()) or (now.get("ended") and not ended(resource))
    if len(resource["script"]) > 1 and resource.get("shown") and not blocked:
        resource["script"].pop(0)
        now = state(resource)
        if "signal" in now:
            for pid in CLOUD.glob(f"{name}*/*/block_recurrent/runs/*/pid"):
                os.kill(int(pid.read_text()), signal.Signals[now["signal"]])
        if "touch" in now:
            Path(now["touch"]).touch()
        if now["state"] == "SUSPENDED":
            remove_machines(resource)
    resource["shown"] = True
    nodes = [{"nodeId": node, "node": {"labels": resource["labels"]}} for node in resource["nodes"]]
    told = {"state": now["state"]}
    if now["state"] == "FAILED":
        told["failedData"] = {"error": {"message": now.get("reason", "out of stock")}}
    return json.dumps({"name": name, "tpu": {"nodeSpec": nodes}, "state": told})


def homes(resource: dict) -> list[Path]:
    return [CLOUD / node / f"w-{worker}" for node in resource["nodes"] for worker in range(resource["hosts"])]


def ended(resource: dict) -> bool:
    return all(list(home.glob("block_recurrent/runs/*/exit")) for home in homes(resource))


def remove_machines(resource: dict) -> None:
    for home in homes(resource):
        for session in home.glob("block_recurrent/runs/*/session"):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(int(session.read_text()), signal.SIGKILL)
        shutil.rmtree(home, ignore_errors=True)


def delete(cloud: dict, name: str, flags: dict) -> str:
    resource = found(cloud, name)
    if "force" not in flags and state(resource)["state"] == "ACTIVE":
        fail("FAILED_PRECONDITION: the queued resource has nodes")
    remove_machines(resource)
    del cloud["resources"][name]
    return ""


def ssh(cloud: dict, name: str, flags: dict) -> str:
    resource = found(cloud, name)
    if state(resource)["state"] != "ACTIVE" or cloud.get("unreachable"):
        fail("ssh: connect to host: Connection refused")
    nodes = resource["nodes"] if flags["node"] == "all" else [resource["nodes"][int(flags["node"])]]
    workers = range(resource["hosts"]) if flags["worker"] == "all" else [int(flags["worker"])]
    told, code = "", 0
    for node in nodes:
        for worker in workers:
            home = CLOUD / node / f"w-{worker}"
            home.mkdir(parents=True, exist_ok=True)
            environment = {**os.environ, "HOME": str(home), "FAKE_HOST": f"{node}-w-{worker}"}
            done = subprocess.run(
                ["bash", "-c", flags["command"]], cwd=home, env=environment, capture_output=True, text=True
            )
            told += done.stdout
            code = code or done.returncode
            sys.stderr.write(done.stderr)
    if code:
        print(told, end="")
        sys.exit(code)
    return told


def storage(verb: str, *words: str) -> str:
    target = CLOUD / "buckets" / words[-1].removeprefix("gs://")
    if verb == "cp":
        if not (CLOUD / "buckets" / words[-1].split("/")[2]).is_dir():
            fail("HTTPError 404: The specified bucket does not exist.")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(sys.stdin.read())
    elif verb == "rm":
        target.unlink()
    else:
        buckets = CLOUD / "buckets"
        found = sorted(file.relative_to(buckets) for file in buckets.glob(str(target.relative_to(buckets))))
        return "".join(f"gs://{name}\n" for name in found) or fail("One or more URLs matched no objects.")
    return ""


def answer(cloud: dict, words: str) -> str:
    for beginning, told in cloud["answers"].items():
        if words.startswith(beginning):
            return f"{told}\n" if told is not None else fail(f"PERMISSION_DENIED: {beginning}")
    return fail(f"Invalid choice: {words}")


if __name__ == "__main__":
    main(sys.argv[1:])
