"""What is found out of a run before anything is paid for."""

import subprocess
from dataclasses import replace

import pytest

from block_recurrent.errors import MISTAKE, UserError
from launch import checking
from launch.checking import check, check_runs, split_arguments
from launch.jobs import Job
from launch.repository import is_local
from tests.launch.conftest import ROOT, git

WHERE = ("--slice=v5litepod-8", "--zone=z", "--project=p")
JOB = Job("mine", slice="v5litepod-8", commit="c0ffee", arguments=["--gin_file=tests/tiny.gin"], per_hour=10.0)
FITS = {"store": "gs://b/pg19", "plans": [{"problems": [], "estimate": {"hours_range": [1.0, 2.0]}}]}


def test_a_run_that_does_not_fit_its_slice_is_not_sent(cloud, repository, capsys):
    """Four rows on eight chips, planned by the code of the commit; the slice is there and stays unused."""
    assert cloud.launch("up", "mine", *WHERE) == 0
    run = ("--workdir=gs://b/mine", "--shared-disk", "--", "--gin_file=tests/tiny.gin")
    assert cloud.launch("run", "mine", *run, checked=True) == MISTAKE
    told = "error: mine does not fit v5litepod-8: 4 rows do not divide over data x fsdp = 8: take a multiple of 8"
    assert capsys.readouterr().err.startswith(told) and not cloud.calls("ssh")


@pytest.mark.parametrize("command", ["up", "run", "sweep", "jobset"])
def test_what_is_not_in_the_commit_is_not_sent(cloud, repository, capsys, command):
    """Nor booked for, where the arguments are known by then."""
    more = (
        "--workdir=gs://b/mine",
        "--shared-disk",
        *(("--now", "--sweep=train.seed=0,1") if command == "sweep" else ()),
    )
    if command == "run":
        assert cloud.launch("up", "mine", *WHERE) == 0
    created = len(cloud.calls("create"))
    arguments = (command, "mine", *WHERE, *more, "--", "--gin_file=configs/mine.gin")
    assert cloud.launch(*arguments, checked=True) == MISTAKE
    commit = git(repository, "rev-parse", "HEAD")[:12]
    assert f"workers have no configs/mine.gin: it is not in commit {commit}; commit" in capsys.readouterr().err
    assert len(cloud.calls("create")) == created and not cloud.calls("ssh")


def test_the_commit_that_is_sent_is_checked_and_not_what_lies_here(cloud, repository, monkeypatch):
    seen = []
    monkeypatch.setattr(checking, "check", lambda run, code: seen.append((code / "configs" / "new.gin").exists()))
    (repository / "configs" / "new.gin").touch()
    try:
        list(check_runs([Job("mine", commit=git(repository, "rev-parse", "HEAD"))]))
    finally:
        (repository / "configs" / "new.gin").unlink()
    assert seen == [False]


@pytest.fixture
def planning(monkeypatch):
    """Stands in for `plan`, with what it prints and what it complains of."""

    def planned(document: dict) -> None:
        monkeypatch.setattr(checking, "plan", lambda gin, where, code: document)

    planned(FITS)
    return planned


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--profil", "--gin_file=tests/tiny.gin"], None),
        (["--profilee", "--gin_file=tests/tiny.gin"], "block_recurrent.train has no --profilee"),
        (["--patience=soon", "--gin_file", "tests/tiny.gin"], "patience"),
        (["--gin.STEPS=3"], "the arguments of block_recurrent.train have no --gin_file"),
        (["--gin_file=/tests/tiny.gin"], "workers have no /tests/tiny.gin"),
        ([f"--gin_file={ROOT}/tests/tiny.gin"], "workers have no"),
    ],
)
def test_flags_and_files_that_training_would_refuse_are_refused(planning, arguments, told):
    job = Job("mine", slice="v5litepod-8", commit="c0ffee", arguments=arguments, per_hour=10.0)
    if told is None:
        assert check(job, ROOT).endswith("fits v5litepod-8 by shapes; estimate: 1.0 to 2.0 h, $10.00 to $20.00")
    else:
        with pytest.raises(UserError, match=told):
            check(job, ROOT)


@pytest.mark.parametrize(("store", "shared"), [("data/pg19", True), ("data/pg19", False), ("/disk/pg19", False)])
def test_data_that_workers_do_not_have_is_refused(planning, store, shared):
    planning({**FITS, "store": store})
    with pytest.raises(UserError, match=f"workers have no data {store}: prepare it into a bucket"):
        check(replace(JOB, shared_disk=shared), ROOT)
    planning({**FITS, "store": "/disk/pg19"})
    assert "fits v5litepod-8" in check(replace(JOB, shared_disk=True), ROOT)


@pytest.mark.parametrize("source", [["--from=runs/mine@best"], ["--from", "runs/mine"], ["--from=/disk/mine"]])
def test_a_warm_start_from_a_run_that_workers_do_not_have_is_refused(planning, source):
    job = Job("mine", slice="v5litepod-8", commit="c0ffee", arguments=["--gin_file=tests/tiny.gin", *source])
    with pytest.raises(UserError, match=r"workers have no run (runs|/disk)/mine.*: copy it into a bucket"):
        check(job, ROOT)
    checking.check_source(["--from=gs://b/mine@best"], shared_disk=False)
    checking.check_source(["--from=/disk/mine"], shared_disk=True)


@pytest.mark.parametrize(
    ("errors", "told"),
    [
        ("a warning\nerror: no gin name STEP: did you mean STEPS?\n", "^no gin name STEP: did you mean STEPS.$"),
        ("ModuleNotFoundError: No module named 'jax'\n", "cannot be checked here .*named 'jax'.; --unchecked sends it"),
    ],
)
def test_what_plan_complains_of_is_passed_on(monkeypatch, errors, told):
    silent = subprocess.CompletedProcess([], 2, "", errors)
    monkeypatch.setattr(checking, "module", lambda *_: silent)
    with pytest.raises(UserError, match=told):
        checking.plan([], "v5litepod-8", ROOT)


def test_arguments_of_two_words_are_found():
    found = split_arguments(["--gin_file", "a.gin", "--patience", "3", "--gin.X=1", "--gin_file=b.gin"])
    assert found == (["--gin_file=a.gin", "--gin.X=1", "--gin_file=b.gin"], ["--patience", "3"])


@pytest.mark.parametrize(
    ("url", "local"),
    [
        ("https://example.com/x.git", False),
        ("git@example.com:me/x.git", False),
        ("ssh://host/x", False),
        ("host:x.git", False),
        ("/home/me/x", True),
        ("../x.git", True),
        ("./a:b", True),
        ("file:///x", True),
        ("FILE:///x", True),
    ],
)
def test_addresses_of_this_machine_are_known(url, local):
    assert is_local(url) == local
