"""The shell files: clean, an environment made once, and Slurm's requeueing."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch.conftest import PATIENCE, ROOT, program, wait_for

SHELL_FILES = [*(ROOT / "launch").glob("*.sh"), ROOT / ".ci" / "run"]


def test_shell_files_are_clean():
    shellcheck = shutil.which("shellcheck") or shutil.which("shellcheck", path=str(Path(sys.executable).parent))
    if shellcheck is None:
        pytest.skip("no program shellcheck: pip install -r requirements.txt brings it")
    files = [str(file) for file in SHELL_FILES if file.exists()]
    done = subprocess.run([shellcheck, *files], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.fixture
def worker(tmp_path):
    """Runs worker.sh with a uv that writes down what it is asked for and makes a Python that does nothing."""
    programs = tmp_path / "programs"
    programs.mkdir()
    make = 'if [ "$1" = venv ]; then mkdir -p "${!#}/bin"; ln -s "$(command -v true)" "${!#}/bin/python"; fi'
    program(programs / "uv", f'echo "$*" >>{tmp_path}/asked', f"[ -e {tmp_path}/works ] || exit 1", make)
    environment = {"PATH": f"{programs}:/usr/bin:/bin", "HOME": str(tmp_path), "BR_HOME": str(tmp_path / "home")}

    def run(*arguments: str, **more: str) -> subprocess.CompletedProcess:
        command = ["bash", str(ROOT / "launch" / "worker.sh"), *arguments]
        return subprocess.run(command, env={**environment, **more}, capture_output=True, text=True)

    return run


def test_the_environment_is_made_once_from_the_pins_with_its_own_python(worker, tmp_path):
    assert worker("setup").returncode == 1, "what fails half-way is not taken for an environment"
    (tmp_path / "works").touch()
    first, second = worker("setup"), worker("setup")
    assert first.returncode == second.returncode == 0 and first.stdout == second.stdout
    assert Path(first.stdout.strip()).is_relative_to(tmp_path / "home")
    venv, install = (tmp_path / "asked").read_text().splitlines()[1:]
    assert "--python 3.11" in venv and install.endswith("requirements-tpu.txt")
    other = worker("setup", BR_REQUIREMENTS="requirements-gpu.txt")
    assert other.stdout != first.stdout, "other pins, another environment"


def test_in_a_container_the_script_becomes_the_training(worker, tmp_path):
    python = program(tmp_path / "python", 'echo "$@"; echo "slices $MEGASCALE_NUM_SLICES"; exit 9')
    done = worker("foreground", "--gin_file=x.gin", BR_PYTHON=str(python), MEGASCALE_NUM_SLICES="2")
    assert done.returncode == 9 and done.stdout == f"-m block_recurrent.train {PATIENCE} --gin_file=x.gin\nslices 2\n"


def test_stale_variables_of_several_slices_do_not_reach_a_run(worker, tmp_path):
    python = program(tmp_path / "python", 'echo "slices ${MEGASCALE_NUM_SLICES-unset}"')
    worker("start", "mine", "/nowhere", BR_PYTHON=str(python), MEGASCALE_NUM_SLICES="2")
    log, code = (tmp_path / "home" / "runs" / "mine" / name for name in ("log", "exit"))
    wait_for(code)
    assert "slices unset" in log.read_text() and code.read_text() == "0\n"


def test_a_stop_between_two_children_reaches_the_next(worker, tmp_path):
    """The one that was written down has ended, and the next is not written down yet."""
    folder = tmp_path / "home" / "runs" / "mine"
    python = program(tmp_path / "python", "exec sleep 60")
    worker("start", "mine", "/nowhere", BR_PYTHON=str(python))
    wait_for(folder / "pid")
    (folder / "pid").write_text("99999999")
    stopped = worker("stop", "mine")
    assert stopped.returncode == 0 and stopped.stdout.endswith("told to stop\n") and not stopped.stderr
    worker("kill", "mine")
    assert not (folder / "exit").exists()

    worker("supervise", "mine", "/nowhere", BR_PYTHON=str(python))  # as if it came to the training only now
    assert (folder / "exit").read_text() == "143\n"
    worker("start", "mine", "/nowhere", BR_PYTHON="true")
    wait_for(folder / "exit")
    assert (folder / "exit").read_text() == "0\n"  # the next run is not stopped by it


def test_a_worker_tells_what_its_run_does_and_how_long_ago(worker, tmp_path):
    file = tmp_path / "home" / "runs" / "mine" / "progress.json"
    python = program(tmp_path / "python", 'cat "$BLOCK_RECURRENT_PROGRESS"; echo "$BLOCK_RECURRENT_OWNER $PWD"')
    assert worker("status", "mine", "/nowhere").stdout.endswith(" state=none step=0\n")
    worker("start", "mine", "/nowhere", BR_PYTHON=str(python))
    wait_for(file.parent / "exit")
    log = (file.parent / "log").read_text()
    assert '"state": "starting", "step": 0, "steps": 0}' in log and "mine /" in log
    for text, told in {
        '{"time": 0, "state": "training", "step": 1200, "steps": 5000}': "training at=1200 of=5000",
        '{\n "steps": null,\n "step": 7,\n "state": "saving",\n "time": 12.75\n}': "saving at=7 of=0",
    }.items():
        file.write_text(text)
        assert re.search(f" doing={told} age=[0-9]{{9,}}\n$", worker("status", "mine", "/nowhere").stdout)
    for nothing in ("", "{"):
        file.write_text(nothing)
        assert worker("status", "mine", "/nowhere").stdout.endswith(" state=exited code=0 step=0\n")


@pytest.mark.parametrize(("code", "requeued"), [(0, 0), (42, 1), (7, 1)])
def test_slurm_puts_a_stopped_job_back_in_the_queue(tmp_path, code, requeued):
    done = sbatch(tmp_path, f"exit {code}")
    assert done.returncode == code, done.stderr
    calls = (tmp_path / "calls").read_text().splitlines()
    assert calls.count("scontrol requeue 77") == requeued
    assert calls[0].startswith("srun ") and calls[0].endswith(f"-m block_recurrent.train --workdir={tmp_path}/run")


def test_slurm_gives_up_after_three_tries_without_progress(tmp_path):
    for _ in range(2):
        sbatch(tmp_path, "exit 7")
    assert (tmp_path / "calls").read_text().count("requeue") == 2
    sbatch(tmp_path, f"mkdir -p {tmp_path}/run/checkpoints/10; exit 7")
    assert (tmp_path / "calls").read_text().count("requeue") == 3, "progress starts the count again"
    for _ in range(2):
        sbatch(tmp_path, "exit 7")
    assert (tmp_path / "calls").read_text().count("requeue") == 4


def test_slurm_finds_the_workdir_however_it_is_given(tmp_path):
    for _ in range(3):
        sbatch(tmp_path, "exit 7", "--workdir", str(tmp_path / "other"))
    assert (tmp_path / "calls").read_text().count("requeue") == 2
    sbatch(tmp_path, f"mkdir -p {tmp_path}/other/checkpoints/10; exit 7", "--workdir", str(tmp_path / "other"))
    assert (tmp_path / "calls").read_text().count("requeue") == 3, "progress starts the count again"


def sbatch(tmp_path: Path, training: str, *workdir: str) -> subprocess.CompletedProcess:
    programs, checkout = tmp_path / "programs", tmp_path / "checkout"
    if not programs.exists():
        programs.mkdir()
        shutil.copytree(ROOT / "launch", checkout / "launch")
        program(programs / "scontrol", f'echo "scontrol $*" >>{tmp_path}/calls')
        program(programs / "git", "echo stand-in")
    program(programs / "srun", f'echo "srun $*" >>{tmp_path}/calls', training)
    environment = {
        **os.environ,
        "PATH": f"{programs}:{os.environ['PATH']}",
        "SLURM_SUBMIT_DIR": str(checkout),
        "SLURM_JOB_ID": "77",
        "BR_PYTHON": "python",
    }
    command = ["bash", str(ROOT / "launch" / "slurm.sh"), *(workdir or [f"--workdir={tmp_path}/run"])]
    return subprocess.run(command, env=environment, capture_output=True, text=True)
