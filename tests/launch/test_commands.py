"""The exact commands (golden files), what is refused, doctor and sweep. UPDATE_GOLDEN=1 writes the golden files."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from block_recurrent.errors import MISTAKE, PREEMPTED, UserError
from launch.cloud import Cloud, CloudError
from launch.jobs import Job
from launch.sweep import expand, parse
from tests.launch.conftest import ROOT, git, program

GOLDEN = Path(__file__).parent / "golden"
WHERE = ("--slice=v5litepod-16", "--zone=us-west4-a", "--project=my-project")
RUN = ("--workdir=gs://bucket/mine", "--repository=https://example.com/block-recurrent.git")
TRAINING = ("--", "--gin_file=configs/pg19/rec_fixed_skip.gin", "--gin.STORE='gs://bucket/pg19'")

COMMANDS = {
    "up": ("up", *WHERE, "--spot"),
    "up_several": ("up", "--slice=2xv4-32", *WHERE[1:], "--create-flag=--network=mine"),
    "run": ("run", *WHERE, *RUN, *TRAINING),
    "watch": ("watch", *WHERE, *RUN, "--spot", "--down", "--max-hours=5", "--commit=COMMIT", *TRAINING),
    "logs": ("logs", *WHERE, "--commit=COMMIT", "--worker=3", "--follow"),
    "logs_all": ("logs", "--slice=2xv4-32", *WHERE[1:], "--commit=COMMIT", "--worker=all"),
    "logs_second_slice": ("logs", "--slice=2xv4-32", *WHERE[1:], "--commit=COMMIT", "--worker=5"),
    "stop": ("stop", *WHERE, "--commit=COMMIT", "--ssh-flag=--tunnel-through-iap"),
    "doctor": ("doctor", *WHERE, *RUN),
    "sweep": ("sweep", *WHERE, *RUN, "--sweep=train.seed=0,1", "--sweep=LEARNING_RATE=0.5,1.0", *TRAINING),
    "sweep_now": ("sweep", *WHERE, *RUN, "--now", "--sweep=train.seed=0,1", *TRAINING),
    "jobset": ("jobset", "--slice=2xv5litepod-16", "--spot", *RUN, *TRAINING),
}


@pytest.mark.parametrize("golden", COMMANDS)
def test_dry_run_prints_the_exact_commands_and_does_nothing(cloud, repository, capsys, golden):
    command, *more = COMMANDS[golden]
    commit = git(repository, "rev-parse", "HEAD")
    more = [argument.replace("COMMIT", commit) for argument in more]
    assert cloud.launch(command, "mine", "--dry-run", *more) == 0
    told = capsys.readouterr().out.replace(commit, "COMMIT")
    told = re.sub(r"owner=\w+", "owner=OWNER", re.sub(r"doctor-\d+", "doctor-PID", told.replace(str(ROOT), "HERE")))
    file = GOLDEN / f"{golden}.txt"
    if os.environ.get("UPDATE_GOLDEN"):
        file.parent.mkdir(exist_ok=True)
        file.write_text(told)
    assert told == file.read_text()
    assert not cloud.calls() and not list(cloud.state.glob("*.json"))


def test_a_dry_run_of_all_remembers_what_a_real_one_would(cloud, repository, capsys):
    """Each command after the first is given the name alone."""
    commands = {
        ("up", *WHERE, "--spot"): "create mine-1 ",
        ("run", *RUN, *TRAINING): "worker.sh start mine gs://bucket/mine --gin_file=configs/pg19/rec_fixed_skip.gin",
        ("watch",): "create mine-2 --zone=us-west4-a",
        ("logs",): "worker.sh tail mine 100",
        ("stop",): "worker.sh stop mine",
        ("down",): "delete mine-1 --zone=us-west4-a",
        ("up",): "create mine-2 ",
    }
    for (command, *more), told in commands.items():
        assert cloud.launch(command, "mine", "--dry-run", *more) == 0
        assert told in capsys.readouterr().out
    assert cloud.launch("down", "mine", "--dry-run") == 0
    assert cloud.launch("run", "mine", "--dry-run") == MISTAKE, "there is no slice any more"
    assert "job mine has no slice yet" in capsys.readouterr().err
    assert not cloud.calls() and cloud.launch("down", "mine") == MISTAKE, "of a real job nothing is known"
    assert cloud.launch("up", "mine", *WHERE) == 0
    capsys.readouterr()
    assert cloud.launch("down", "mine", "--dry-run") == 0
    assert "delete mine-1 " in capsys.readouterr().out, "what was rehearsed gives way to what happened"


def test_down_dry_run_names_what_it_would_delete(cloud, capsys):
    assert cloud.launch("up", "mine", *WHERE) == 0
    capsys.readouterr()
    before = len(cloud.calls())
    assert cloud.launch("down", "mine", "--dry-run") == 0
    lines = capsys.readouterr().out.splitlines()
    delete = "gcloud compute tpus queued-resources delete mine-1 --zone=us-west4-a --project=my-project --quiet --force"
    assert lines[-1] == delete and len(lines) == 2
    assert len(cloud.calls()) == before and set(cloud.resources) == {"mine-1"}


def test_the_jobset_means_what_launch_does(cloud, repository, capsys):
    command, *more = COMMANDS["jobset"]
    assert cloud.launch(command, "mine", *more) == 0
    jobset = yaml.safe_load(capsys.readouterr().out)
    job = jobset["spec"]["replicatedJobs"][0]
    pods = job["template"]["spec"]
    (container,) = pods["template"]["spec"]["containers"]
    assert job["replicas"] == 2 and pods["parallelism"] == pods["completions"] == 4
    assert container["args"] == [RUN[0], *TRAINING[1:]]
    assert '"$@"' in container["command"][2] and container["resources"]["limits"] == {"google.com/tpu": 4}
    selector = pods["template"]["spec"]["nodeSelector"]
    assert selector["cloud.google.com/gke-tpu-topology"] == "4x4" and selector["cloud.google.com/gke-spot"] == "true"
    preempted = pods["podFailurePolicy"]["rules"][0]["onExitCodes"]
    assert preempted["values"] == [42] and preempted["containerName"] == container["name"]
    assert cloud.launch(command, "mine", *(argument for argument in more if argument != "--spot")) == 0
    assert "gke-spot: " not in capsys.readouterr().out
    assert cloud.launch(command, "mine", *more, "--gin.X='$(COMMIT)'") == 0
    assert "\"--gin.X='$$(COMMIT)'\"" in capsys.readouterr().out, "Kubernetes would put its variable there"


@pytest.mark.parametrize(
    ("command", "more", "message"),
    [
        ("up", ["--slice=v5litepod-17", *WHERE[1:]], "no slice is called 'v5litepod-17'"),
        ("up", ["--slice=h100-8", *WHERE[1:]], "h100-8 are GPUs, which launch does not book: see launch/slurm.sh"),
        ("up", ["--zone=z"], "job mine has no --slice, --project: give it once, it is remembered"),
        ("run", [*WHERE, *RUN], "nothing to run: give the arguments of block_recurrent.train after --"),
        ("run", [*WHERE, "--workdir=runs/mine", *TRAINING], "workers need gs://BUCKET/FOLDER, or an absolute path"),
        ("run", [*WHERE, "--workdir=/runs/mine", *TRAINING], "and --shared-disk"),
        ("run", [*WHERE, RUN[0], *TRAINING], "remote.git, a path of this machine: push to a server"),
        ("sweep", [*WHERE, *RUN[:1], "--repository=file:///x", *TRAINING], "workers cannot clone file:///x, a path"),
        ("jobset", [*WHERE, *RUN[:1], "--repository=../x", *TRAINING], "workers cannot clone ../x, a path of this"),
        ("up", [*WHERE, "--interval=0"], "--interval: '0' is not a number above 0"),
        ("up", [*WHERE, "--max-hours=nan"], "--max-hours: 'nan' is not a number above 0"),
        ("run", ["--max-cost=-3"], "--max-cost: '-3' is not a number above 0"),
        ("watch", ["--patience=0"], "--patience: '0' is not a whole number, 1 or more"),
        ("sweep", ["--grace=-1"], "--grace: '-1' is not a number, 0 or more"),
        ("watch", ["--stall=soon"], "--stall: 'soon' is not a number above 0"),
        ("logs", ["--lines=-1"], "--lines: '-1' is not a whole number, 0 or more"),
        ("fly", [], "COMMAND: invalid choice: 'fly'"),
        ("run", [*WHERE, *RUN, *TRAINING, "--workdir=/x"], "give --workdir before the --"),
        ("run", [*WHERE, *RUN, *TRAINING], "job mine has no slice yet: python -m launch up mine"),
        ("run", [*WHERE, *RUN, "--commit=nowhere", *TRAINING], "no commit nowhere in this repository: see git log"),
        (
            "run",
            [*WHERE, "--workdir=s3://bucket/mine", *TRAINING],
            "workers need gs://BUCKET/FOLDER, or an absolute path",
        ),
        ("watch", [], "no job mine"),
        ("down", [], "no job mine"),
        ("logs", [*WHERE, "--dry-run", "--commit=HEAD", "--worker=4"], "v5litepod-16 has 0 to 3, or all"),
        ("logs", [*WHERE, "--dry-run", "--commit=HEAD", "--worker=²"], "v5litepod-16 has 0 to 3, or all"),
        ("logs", [*WHERE, "--dry-run"], "job mine was never run: python -m launch run mine"),
        ("sweep", [*WHERE, *RUN, "--sweep=train.seed", *TRAINING], "write NAME=VALUE,VALUE"),
    ],
)
def test_mistakes_are_told_in_one_line_and_nothing_is_created(cloud, repository, capsys, command, more, message):
    assert cloud.launch(command, "mine", *more) == MISTAKE
    told = capsys.readouterr().err
    assert message in told and told.startswith("error: ") and told.count("\n") == 1
    assert not cloud.resources and not (cloud.state / "mine.json").exists()


def test_a_jobset_whose_pods_would_have_too_long_names_is_refused(cloud, repository, capsys):
    command, *more = COMMANDS["jobset"]
    assert cloud.launch(command, "m" * 47, *more) == 0
    assert len(f"{'m' * 47}-slice-1-3-abcde") == 63 and capsys.readouterr().out
    assert cloud.launch(command, "m" * 48, *more) == MISTAKE
    assert "is too long a name for a JobSet of 2xv5litepod-16: use up to 47 letters" in capsys.readouterr().err


def test_debug_among_the_arguments_of_training_is_passed_on(cloud, repository, capsys):
    command, *more = COMMANDS["jobset"]
    assert cloud.launch(command, "mine", "--debug", *more, "--debug") == 0
    (line,) = re.findall(r"args: (.*)", capsys.readouterr().out)
    assert line.count('"--debug"') == 1


def test_launch_needs_only_what_is_light_of_the_library():
    program = (
        "import sys, launch.__main__; print(*sorted(name for name in sys.modules if name.startswith('block_rec')))"
    )
    told = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    used = {"commandline", "errors", "prices", "ranges", "slices"}
    assert set(told.split()) == {"block_recurrent", *(f"block_recurrent.{name}" for name in used)}


def test_a_missing_gcloud_is_told(cloud, capsys):
    assert cloud.launch("up", "mine", *WHERE, "--gcloud=nowhere/gcloud") == MISTAKE
    assert "no program nowhere/gcloud: install the Google Cloud SDK" in capsys.readouterr().err


def test_a_creation_that_fails_is_told_though_nothing_more_can_be_asked(cloud, tmp_path, capsys):
    broken = program(tmp_path / "gcloud", 'echo "ERROR: no permission to $4" >&2; exit 1')
    assert cloud.launch("up", "mine", *WHERE, f"--gcloud={broken}") == MISTAKE
    assert "creating mine-1 failed (exit code 1): ERROR: no permission to create" in capsys.readouterr().err
    assert cloud.job("mine")["created"] == ["mine-1"], "it may be there"


def test_a_gcloud_that_never_answers_is_given_up(tmp_path, monkeypatch):
    monkeypatch.setattr("launch.cloud.ANSWER", 0.1)
    silent = Cloud(str(program(tmp_path / "gcloud", "exec sleep 60")))
    with pytest.raises(CloudError, match="ssh to mine-1 failed: no answer in 0 s"):
        silent.ssh(Job("mine"), "true")


def test_changes_that_workers_would_not_get_are_refused(cloud, published, tmp_path, monkeypatch, capsys):
    clone = tmp_path / "clone"
    shutil.copytree(published, clone)
    monkeypatch.chdir(clone)
    monkeypatch.setenv("BR_PYTHON", str(program(tmp_path / "python", "exit 0")))
    assert cloud.launch("up", "mine", *WHERE) == 0
    (clone / "requirements.txt").write_text("")
    run = ("run", "mine", "--workdir=/shared", "--shared-disk", *TRAINING)
    assert cloud.launch(*run) == MISTAKE
    assert "1 files are not committed (first: requirements.txt)" in capsys.readouterr().err
    git(clone, "commit", "--quiet", "--all", "--message=more")
    assert cloud.launch(*run) == MISTAKE
    assert "is on no remote branch known here: push it" in capsys.readouterr().err
    git(clone, "reset", "--quiet", "--soft", "HEAD~1")
    assert cloud.launch("run", "mine", "--allow-dirty", *run[2:]) == 0, "the commit, without the later changes"


def test_a_job_of_an_earlier_version_goes_on(cloud, repository, capsys):
    """Its workdir is a path: `watch` takes it as before, `run` wants to hear of the shared disk once."""
    told = {"name": "mine", "project": "p", "zone": "z", "slice": "v5litepod-8", "spot": True, "repository": "/x"}
    told |= {"commit": git(repository, "rev-parse", "HEAD"), "workdir": "/x", "arguments": ["--gin_file=x.gin"]}
    told |= {"create_flags": [], "ssh_flags": [], "owner": "o", "created": [], "attempts": 3, "stopped": True}
    cloud.state.mkdir()
    (cloud.state / "mine.json").write_text(json.dumps({**told, "started": False}))
    assert cloud.launch("watch", "mine") == PREEMPTED and "mine was stopped" in capsys.readouterr().out
    assert cloud.launch("run", "mine") == MISTAKE and "--shared-disk" in capsys.readouterr().err
    assert cloud.launch("up", "mine") == 0 and set(cloud.resources) == {"mine-4"}


def quota(name: str, **zones: int) -> dict:
    """One of Google's quotas, as it is listed, with its limits in zones (hyphens as underscores)."""
    places = [(zone.replace("_", "-"), limit) for zone, limit in zones.items()]
    infos = [
        {"dimensions": {"zone": zone}, "details": {"value": str(limit)}, "applicableLocations": [zone]}
        for zone, limit in places
    ]
    return {"quotaId": f"TPU{name}PerProjectPerZoneForTPUAPI", "dimensions": ["zone"], "dimensionsInfos": infos}


QUOTAS = [
    quota("V5sLitepod", us_west4_a=16, us_west4_b=0),
    quota("V5sLitepodServing", us_west4_a=4),
    quota("V5sLitepodPreemptible", us_west4_a=8),
    quota("V5P", us_west4_a=-1),
]

ANSWERS = {
    "version": "528.0.0",
    "auth list": "me@example.com",
    "projects describe": "my-project",
    "compute tpus accelerator-types list": "v5litepod-8\nv5litepod-16",
    "beta quotas info list": json.dumps(QUOTAS),
}


@pytest.fixture
def healthy(cloud, repository, tmp_path, monkeypatch):
    cloud.change(answers=ANSWERS)
    (cloud.folder / "buckets" / "bucket").mkdir(parents=True)
    program(tmp_path / "programs" / "ssh-add", "echo a key")
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".ssh").mkdir()
    (tmp_path / ".ssh" / "google_compute_engine").touch()
    return cloud


def test_doctor_finds_all_well_and_leaves_nothing_behind(healthy, capsys):
    assert healthy.launch("doctor", "mine", *WHERE, "--workdir=gs://bucket/mine", "--shared-disk") == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 9 and all(line.startswith("ok ") for line in lines)
    assert not list((healthy.folder / "buckets" / "bucket" / "mine").iterdir()) and not healthy.resources


@pytest.mark.parametrize(
    ("answers", "more", "line"),
    [
        ({"auth list": ""}, (), "FAILED  login: nobody is logged in. Do: gcloud auth login"),
        ({"projects describe": None}, (), "FAILED  project and zone: project my-project failed"),
        ({"compute tpus": "v5litepod-8"}, (), "us-west4-a does not offer v5litepod-16 (v5litepod-8)"),
        ({"compute tpus": None}, (), "gcloud services enable tpu.googleapis.com"),
        ({"beta quotas info list": None}, (), "FAILED  quota: reading quotas failed"),
        ({}, ("--workdir=gs://other/mine",), "FAILED  bucket: writing to gs://other/mine failed"),
        ({}, ("--workdir=/local",), "FAILED  bucket: /local is not in a bucket"),
        ({}, ("--repository=/nowhere",), "FAILED  code: workers cannot clone /nowhere, a path of this machine"),
        ({}, ("--repository=/nowhere", "--shared-disk"), "FAILED  code: git ls-remote"),
        ({}, ("--gcloud=nowhere",), "FAILED  gcloud: nowhere is not on the PATH. Do: install the Google Cloud SDK"),
    ],
)
def test_doctor_says_what_is_wrong_and_what_to_do(healthy, capsys, answers, more, line):
    kept = {key: value for key, value in ANSWERS.items() if not any(key.startswith(changed) for changed in answers)}
    healthy.change(answers={**kept, **answers})
    assert healthy.launch("doctor", "mine", *WHERE, "--workdir=gs://bucket/mine", *more) == 1
    assert line in capsys.readouterr().out


@pytest.mark.parametrize(
    ("more", "line"),
    [
        ((), "ok      quota: TPUV5sLitepodPerProjectPerZoneForTPUAPI is 16 in us-west4-a, v5litepod-16 needs 16"),
        (
            ("--slice=v5p-128",),
            "ok      quota: TPUV5PPerProjectPerZoneForTPUAPI is unlimited in us-west4-a, v5p-128 needs 128",
        ),
        (
            ("--slice=2xv5e-16",),
            "FAILED  quota: TPUV5sLitepodPerProjectPerZoneForTPUAPI is 16 in us-west4-a, 2xv5e-16 needs 32",
        ),
        (
            ("--slice=v5e-8",),
            "FAILED  quota: TPUV5sLitepodServingPerProjectPerZoneForTPUAPI is 4 in us-west4-a, v5e-8 needs 8",
        ),
        (("--spot",), "is 8 in us-west4-a, v5litepod-16 --spot needs 16. Do: ask for more on the console's quota page"),
        (("--zone=us-west4-b",), "FAILED  quota: TPUV5sLitepodPerProjectPerZoneForTPUAPI is 0 in us-west4-b"),
        (("--zone=us-east1-c",), "FAILED  quota: v5litepod-16 needs 16, and no quota for it in us-east1-c is listed"),
        (("--slice=v6e-16",), "FAILED  quota: v6e-16 needs 16, and no quota for it in us-west4-a is listed"),
    ],
)
def test_doctor_compares_the_quota_with_what_the_slice_needs(healthy, capsys, more, line):
    healthy.launch("doctor", "mine", *WHERE, "--workdir=gs://bucket/mine", *more)
    assert line in capsys.readouterr().out


@pytest.mark.parametrize(
    ("command", "line"),
    [
        ("quotas info list", "ok      quota: TPUV5sLitepodPerProjectPerZoneForTPUAPI is 16"),
        ("neither of them", "-       quota not checked: this gcloud has no `gcloud beta quotas`"),
    ],
)
def test_doctor_tries_both_commands_for_quotas_and_goes_on_without(healthy, capsys, command, line):
    healthy.change(answers={name.replace("beta quotas info list", command): told for name, told in ANSWERS.items()})
    assert healthy.launch("doctor", "mine", *WHERE, "--workdir=gs://bucket/mine", "--shared-disk") == 0
    assert line in capsys.readouterr().out


def test_doctor_misses_the_ssh_key(healthy, tmp_path, capsys):
    (tmp_path / ".ssh" / "google_compute_engine").unlink()
    assert healthy.launch("doctor", "mine", *WHERE, "--workdir=gs://bucket/mine") == 1
    assert "FAILED  ssh: no " in capsys.readouterr().out


def test_a_sweep_is_the_product_of_its_values():
    job = Job("s", workdir="gs://b/s", arguments=["--gin_file=x.gin"])
    runs = expand(job, ["train.seed=0,1,2", "LEARNING_RATE=0.5,1.0"])
    assert len(runs) == 6 and len({run.workdir for run in runs}) == 6
    assert runs[1].name == "s-seed-0-learningrate-1-0" and runs[1].workdir == "gs://b/s/seed-0-learningrate-1-0"
    assert runs[1].arguments == ["--gin_file=x.gin", "--gin.train.seed=0", "--gin.LEARNING_RATE=1.0"]


def test_names_of_a_sweep_that_would_clash_or_be_too_long_are_numbers():
    assert [run.name for run in expand(Job("s"), ["X=0.5,'0-5'"])] == ["s-0", "s-1"]
    assert expand(Job("s"), [f"X={'9' * 60}"])[0].name == "s-0"


@pytest.mark.parametrize(
    ("text", "values"),
    [("X=(1,2),(3,4)", ["(1,2)", "(3,4)"]), ("X='a,b', \"c\"", ["'a,b'", '"c"']), ("X=@f(),None", ["@f()", "None"])],
)
def test_commas_in_quotes_and_brackets_divide_nothing(text, values):
    assert parse(text) == ("X", values)


@pytest.mark.parametrize("text", ["X", "X=", "X=1,,2", "X=(1,2", "X='a", "=1"])
def test_a_sweep_that_makes_no_sense_is_refused(text):
    with pytest.raises(UserError, match="--sweep="):
        parse(text)


def test_a_sweep_writes_a_job_a_run_that_up_and_run_take(cloud, repository, tmp_path, monkeypatch):
    monkeypatch.setenv("BR_PYTHON", str(program(tmp_path / "python", "exit 0")))
    where = ("--slice=v5litepod-8", *WHERE[1:], f"--workdir={tmp_path}", "--shared-disk")
    sweep = (*where, "--sweep=train.seed=0,1", *TRAINING)
    assert cloud.launch("sweep", "s", *sweep) == 0 and not cloud.resources
    assert cloud.launch("up", "s-seed-1") == 0
    assert cloud.launch("run", "s-seed-1") == 0
    assert cloud.launch("watch", "s-seed-1", "--interval=0.1") == 0
    assert cloud.launch("sweep", "s", *sweep) == MISTAKE, "its names are taken"


def test_a_sweep_now_runs_all_on_one_booking_and_gives_it_back(cloud, repository, tmp_path, monkeypatch, capfd):
    seen = tmp_path / "seen"
    fails = 'case "$*" in *seed=1*) exit 3;; esac'
    monkeypatch.setenv("BR_PYTHON", str(program(tmp_path / "python", f'echo "$*" >>{seen}', fails)))
    where = ("--slice=v5litepod-8", *WHERE[1:], f"--workdir={tmp_path / 'runs'}", "--shared-disk")
    assert cloud.launch("sweep", "s", *where, "--interval=0.1", "--now", "--sweep=train.seed=0,1,2", *TRAINING) == 3
    seeds = re.findall(r"seed=(\d)", seen.read_text())
    assert seeds == ["0", "1", "1", "1", "2"], "one that fails three times does not keep the next from its turn"
    assert len(cloud.calls("create")) == 1 and not cloud.resources
