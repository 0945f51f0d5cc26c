"""What is asked before money is spent, and what ends the spending."""

import json

import pytest

from block_recurrent.errors import MISTAKE, PREEMPTED
from launch import budget
from launch.budget import REACHED
from launch.jobs import Jobs
from tests.launch.conftest import program, wait_for

WHERE = ("--slice=v5litepod-8", "--zone=z", "--project=p")
QUICK = ("--interval=0.1", "--grace=0.3", "--patience=3")


@pytest.fixture
def answers(monkeypatch):
    """A person at the terminal, who says what they are given to say."""

    def say(*words: str) -> list[str]:
        left = list(words)
        monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
        monkeypatch.setattr("builtins.input", lambda question: left.pop(0))
        return left

    return say


@pytest.mark.parametrize("command", ["up", "sweep"])
def test_a_booking_is_asked_about_with_its_cost_an_hour(cloud, repository, answers, monkeypatch, capsys, command):
    sweep = ("--workdir=gs://b/x", "--shared-disk", "--now", "--sweep=train.seed=0,1", "--", "--gin_file=x.gin")
    more = (*WHERE, "--spot", *(sweep if command == "sweep" else ()))
    assert cloud.launch(command, "mine", *more, yes=False) == MISTAKE
    told = capsys.readouterr().err
    assert "v5litepod-8, spot: about $3.84 an hour" in told and "give --yes to book it, as there is no terminal" in told
    left = answers("n", "y")
    assert cloud.launch(command, "mine", *more, yes=False) == MISTAKE and left == ["y"]
    told = capsys.readouterr()
    assert "about $3.84 an hour" in told.out and "nothing was booked" in told.err
    assert not cloud.calls("create") and not list(cloud.state.glob("*.json"))
    if command == "up":
        assert cloud.launch("up", "mine", *more, yes=False) == 0 and set(cloud.resources) == {"mine-1"}
        assert cloud.launch("up", "mine", yes=False) == 0, "waiting again costs no question"


def test_prices_are_those_of_the_file_given_and_remembered(cloud, tmp_path, capsys):
    (tmp_path / "mine.toml").write_text("about = 'ours'\n[on_demand]\nv5e = 0.5\n")
    assert cloud.launch("up", "mine", *WHERE, f"--prices={tmp_path}/mine.toml", "--max-hours=9") == 0
    assert "about $4.00 an hour, until --max-hours=9 (prices of" in capsys.readouterr().out
    assert cloud.job("mine")["per_hour"] == 4 and cloud.job("mine")["max_hours"] == 9
    assert cloud.launch("up", "other", *WHERE, "--spot", "--max-cost=9", f"--prices={tmp_path}/mine.toml") == MISTAKE
    assert "has no price of v5litepod-8 --spot" in capsys.readouterr().err


@pytest.fixture
def limited(cloud, repository, tmp_path, monkeypatch):
    """A run of a shell script on a slice that was ACTIVE for ten hours, last seen an hour ago."""
    monkeypatch.setattr("time.time", lambda: 1e9)

    def start(*lines: str) -> None:
        monkeypatch.setenv("BR_PYTHON", str(program(tmp_path / "python", *lines)))
        assert cloud.launch("up", "mine", *WHERE) == 0
        training = ("--", "--gin_file=x.gin")
        assert cloud.launch("run", "mine", f"--workdir={tmp_path / 'run'}", "--shared-disk", *training) == 0
        used = {"active_seconds": 36000.0, "spent": 96.0, "seen_active": 1e9 - 3600}
        (cloud.state / "mine.json").write_text(json.dumps({**cloud.job("mine"), **used}))

    return start


def test_time_counts_while_the_slice_is_active_and_no_longer(tmp_path, monkeypatch):
    """Over preemptions, at the price of the time."""
    jobs = Jobs(tmp_path)
    jobs.change("mine", per_hour=36.0)
    for now, active, seconds in (
        *((1000, True, 0), (1060, True, 60), (1070, False, 70)),
        *((9000, False, 70), (9100, True, 70), (9130, True, 100)),
    ):
        monkeypatch.setattr("time.time", lambda now=now: now)
        job = budget.account(jobs, jobs.load("mine"), active)
        assert job.active_seconds == seconds and job.spent == pytest.approx(seconds * 0.01)


@pytest.mark.parametrize(
    ("limit", "reason"),
    [
        ("--max-hours=10.5", "--max-hours=10.5 is reached: mine had a slice for 11.0 hours"),
        ("--max-cost=100", "--max-cost=100 is reached: mine has cost about $106"),
    ],
)
def test_a_limit_lets_the_run_save_and_deletes_the_slice(cloud, limited, tmp_path, capsys, limit, reason):
    limited(f"trap 'touch {tmp_path}/saved; exit {PREEMPTED}' TERM", f"touch {tmp_path}/up", "sleep 60 & wait")
    wait_for(tmp_path / "up")
    assert cloud.launch("watch", "mine", *QUICK, "--grace=60", limit) == REACHED
    told = capsys.readouterr().out
    assert f"{reason}; the slice is deleted. What was saved is in {tmp_path}/run" in told
    assert (tmp_path / "saved").exists() and not cloud.resources and len(cloud.calls("create")) == 1
    assert cloud.job("mine")["active_seconds"] == 11 * 3600 and cloud.job("mine")["seen_active"] == 0
    assert cloud.launch("watch", "mine", *QUICK) == PREEMPTED, "a later watch books nothing"
    assert cloud.launch("up", "mine") == MISTAKE and "to book again, give a higher limit" in capsys.readouterr().err


def test_a_run_that_does_not_listen_does_not_keep_its_slice(cloud, limited, tmp_path):
    limited("trap '' TERM", f"touch {tmp_path}/up", "while :; do sleep 1; done")
    wait_for(tmp_path / "up")
    assert cloud.launch("watch", "mine", *QUICK, "--max-hours=1") == REACHED
    assert not cloud.resources


def test_a_limit_holds_where_nothing_answers_any_more(cloud, limited):
    limited("sleep 60")
    cloud.change(unreachable=True)
    assert cloud.launch("watch", "mine", *QUICK, "--max-hours=1") == REACHED
    assert not cloud.resources


def test_a_run_below_its_limits_goes_on_and_its_time_is_kept(cloud, limited, capsys):
    limited("exit 0")
    assert cloud.launch("watch", "mine", *QUICK, "--max-hours=12", "--max-cost=107") == 0
    job = cloud.job("mine")
    assert job["active_seconds"] == 11 * 3600 and job["seen_active"] == 1e9
    assert job["spent"] == pytest.approx(96 + 9.6) and set(cloud.resources) == {"mine-1"}


def test_a_limited_run_that_is_given_up_does_not_leave_its_slice(cloud, limited, capsys):
    limited("exit 7")
    assert cloud.launch("watch", "mine", *QUICK, "--max-hours=99") == 7
    assert "given up; the slice is deleted, since no watch would keep its limit" in capsys.readouterr().out
    assert not cloud.resources


def test_a_sweep_has_one_limit_for_all_its_runs(cloud, repository, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr("time.time", iter(range(10**9, 10**12, 1000)).__next__)
    monkeypatch.setenv("BR_PYTHON", str(program(tmp_path / "python", "exit 0")))
    where = (*WHERE, f"--workdir={tmp_path}", "--shared-disk", "--interval=0.1", "--max-hours=1.5")
    assert (
        cloud.launch("sweep", "s", *where, "--now", "--sweep=train.seed=0,1,2,3", "--", "--gin_file=x.gin") == REACHED
    )
    assert "--max-hours=1.5 is reached" in capfd.readouterr().out
    assert not cloud.resources and len(cloud.calls("create")) == 1
