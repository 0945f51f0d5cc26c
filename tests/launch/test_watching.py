"""What `watch` does about each way in which a run or its slice can end; the runs are shell scripts."""

import json
from pathlib import Path

import pytest

from block_recurrent.errors import MISTAKE, PREEMPTED
from launch.running import STATUS, Progress, Worker, newest_progress, parse_status
from launch.watching import verdict
from tests.launch.conftest import PATIENCE, program, wait_for

WHERE = ("--slice=v5litepod-8", "--zone=z", "--project=p")
QUICK = ("--interval=0.1", "--grace=0.3", "--patience=3")


@pytest.fixture
def running(cloud, repository, tmp_path, monkeypatch):
    """Starts a job whose training is a shell script, on slices with the scripts given."""

    def start(*lines: str, scripts: tuple = (), on: tuple = WHERE) -> None:
        monkeypatch.setenv("BR_PYTHON", str(program(tmp_path / "python", *lines)))
        cloud.change(scripts=list(scripts))
        assert cloud.launch("up", "mine", *on, "--interval=0.1") == 0
        where = (f"--workdir={tmp_path / 'run'}", "--shared-disk")
        assert cloud.launch("run", "mine", *where, "--", "--gin_file=x.gin") == 0

    return start


def writes(state: str, step: int, time: str = "$(date +%s)") -> str:
    """A line of shell that says what its process 0 would of a run."""
    text = f'{{"time": %s, "state": "{state}", "step": {step}, "steps": 5000}}'
    return f"printf '{text}' {time} >$BLOCK_RECURRENT_PROGRESS"


@pytest.fixture
def heard(monkeypatch, tmp_path):
    """What a watch says; a file is made as soon as it begins with a word."""

    def until(word: str) -> tuple[list[str], Path]:
        told, file = [], tmp_path / "heard"

        def say(text: str) -> None:
            told.append(text)
            if text.startswith(word):
                file.touch()

        monkeypatch.setattr("launch.watching.say", say)
        return told, file

    return until


def test_the_steps_of_a_run_are_shown(cloud, running, heard):
    told, done = heard("training")
    running(writes("training", 1200), f"until [ -e {done} ]; do sleep 0.05; done")
    assert cloud.launch("watch", "mine", *QUICK) == 0
    assert told[-2:] == ["training, step 1,200 of 5,000", "mine is done, at step 0"]


def test_a_run_that_has_not_moved_is_shown_killed_and_tried_again(cloud, running, tmp_path, capfd):
    """Whatever its process says of itself by living on."""
    running(f"echo $BLOCK_RECURRENT_OWNER >>{tmp_path}/tries", "echo the end", writes("saving", 7, "0"), "sleep 60")
    assert cloud.launch("watch", "mine", *QUICK, "--stall=30") == 137
    told = capfd.readouterr().out
    assert "minutes (saving, step 7 of 5,000); it ends with:" in told and "mine-1-w-0: the end" in told
    assert "mine stalled and was killed at step 0: 3 of 3 tries without progress" in told
    assert (tmp_path / "tries").read_text() == "mine\n" * 3 and set(cloud.resources) == {"mine-1"}


def test_a_stalled_run_that_had_got_on_is_not_given_up(cloud, running, tmp_path):
    checkpoint = f'mkdir -p "{tmp_path}/run/checkpoints/7"; [ -e {tmp_path}/second ] && exit 0; touch {tmp_path}/second'
    running(checkpoint, writes("training", 8, "0"), "sleep 60")
    assert cloud.launch("watch", "mine", *QUICK) == 0


def test_a_run_without_a_file_of_its_progress_is_watched_by_its_checkpoints(cloud, running, heard, tmp_path):
    """As those of commits from before there was one are."""
    told, done = heard("running")
    unwritten = f"rm $BLOCK_RECURRENT_PROGRESS; mkdir -p {tmp_path}/run/checkpoints/900; touch {tmp_path}/up"
    running(unwritten, f"until [ -e {done} ]; do sleep 0.05; done")
    wait_for(tmp_path / "up")
    assert cloud.launch("watch", "mine", *QUICK, "--stall=1e-9") == 0
    assert "running, last checkpoint at step 900" in told


def test_done_is_exit_code_0(cloud, running, capfd):
    running("exit 0")
    assert cloud.launch("watch", "mine", *QUICK, "--down") == 0
    assert not cloud.resources, "--down deletes the slice of a run that is done"


def test_three_failures_without_progress_give_up_with_the_runs_code(cloud, running, tmp_path, capfd):
    running(f"echo tried >>{tmp_path}/tries", "echo the reason", "exit 7")
    assert cloud.launch("watch", "mine", *QUICK) == 7
    assert (tmp_path / "tries").read_text().count("tried") == 3
    told = capfd.readouterr().out
    assert "3 of 3 tries without progress" in told and "mine-1-w-0: the reason" in told
    assert set(cloud.resources) == {"mine-1"}, "a failure does not cost the slice"


def test_progress_starts_the_count_again(cloud, running, tmp_path):
    checkpoint = (
        f'n=$(ls {tmp_path}/run/checkpoints 2>/dev/null | wc -l); mkdir -p "{tmp_path}/run/checkpoints/$((n + 1))"'
    )
    running(f"echo tried >>{tmp_path}/tries", f"[ $(wc -l <{tmp_path}/tries) -gt 3 ] || {{ {checkpoint}; }}", "exit 7")
    assert cloud.launch("watch", "mine", *QUICK) == 7
    assert (tmp_path / "tries").read_text().count("tried") == 6, "three that went on, three that did not"


def test_code_42_gets_a_new_slice_and_the_same_command(cloud, running, tmp_path):
    running(f'echo "$@" >>{tmp_path}/tries', f"[ $(wc -l <{tmp_path}/tries) -gt 1 ] || exit {PREEMPTED}")
    cloud.change(resources={**cloud.resources, "theirs": {"script": ["ACTIVE"], "labels": {}, "nodes": [], "hosts": 0}})
    assert cloud.launch("watch", "mine", *QUICK) == 0
    first, second = (tmp_path / "tries").read_text().splitlines()
    assert first == second == f"-m block_recurrent.train --workdir={tmp_path}/run {PATIENCE} --gin_file=x.gin"
    assert set(cloud.resources) == {"mine-2", "theirs"}
    assert cloud.launch("down", "mine") == 0
    assert set(cloud.resources) == {"theirs"}, "what another has created stays"


@pytest.mark.parametrize("end", ["SUSPENDED", "FAILED"])
def test_a_slice_that_is_taken_away_is_replaced(cloud, running, tmp_path, end):
    lives = f"[ -e {tmp_path}/second ] || {{ touch {tmp_path}/second; exec sleep 60; }}"
    running(lives, scripts=([{"state": "ACTIVE", "until": str(tmp_path / "second")}, end],))
    assert cloud.launch("watch", "mine", *QUICK) == 0
    assert set(cloud.resources) == {"mine-2"}


def test_a_slice_that_has_vanished_is_replaced(cloud, running, tmp_path):
    running("exit 0")
    cloud.change(resources={})
    assert cloud.launch("watch", "mine", *QUICK) == 0
    assert set(cloud.resources) == {"mine-2"} and not cloud.calls("delete")


def test_slices_that_never_come_up_are_given_up(cloud, running, capfd):
    failing = ["WAITING_FOR_RESOURCES", {"state": "FAILED", "reason": "no quota"}]
    running("exit 42", scripts=(["ACTIVE"], failing, failing, failing))
    assert cloud.launch("watch", "mine", *QUICK) == MISTAKE
    assert "no quota; given up after 3 tries" in capfd.readouterr().err


def test_a_creation_that_is_refused_is_given_up(cloud, running, capfd):
    running("exit 42", scripts=(["ACTIVE"], *["RESOURCE_EXHAUSTED: quota"] * 3))
    assert cloud.launch("watch", "mine", *QUICK) == MISTAKE
    assert "RESOURCE_EXHAUSTED: quota; given up" in capfd.readouterr().err and not cloud.resources


def test_workers_that_hang_behind_one_that_failed_are_killed(cloud, running, tmp_path, capfd):
    fails_alone = f"[ $FAKE_HOST = mine-1-w-2 ] && exit 5; [ -e {tmp_path}/again ] || exec sleep 60"
    running(fails_alone, on=("--slice=v5litepod-16", *WHERE[1:]))
    assert cloud.launch("watch", "mine", *QUICK) == 5
    told = capfd.readouterr().out
    assert "workers that hang are killed" in told and "mine-1-w-2: === " in told
    status = [line for line in cloud.calls("ssh") if "worker.sh status" in line[-1]]
    assert "--node=all" in status[0] and "--worker=all" in status[0]


def test_workers_that_hang_behind_one_that_is_done_are_started_again(cloud, running, tmp_path, capfd):
    hangs_once = f"[ $FAKE_HOST = mine-1-w-2 ] || [ -e {tmp_path}/again ] || exec sleep 60; touch {tmp_path}/again"
    running(hangs_once, on=("--slice=v5litepod-16", *WHERE[1:]))
    assert cloud.launch("watch", "mine", *QUICK) == 0
    told = capfd.readouterr().out
    assert "workers that hang are killed" in told and "failed with code 137" in told


def test_down_beside_a_watch_ends_it_and_nothing_is_booked_again(cloud, running, capfd):
    running("sleep 60")
    assert cloud.launch("down", "mine") == 0
    assert cloud.launch("watch", "mine", *QUICK) == PREEMPTED
    assert not cloud.resources and len(cloud.calls("create")) == 1
    assert cloud.launch("up", "mine") == 0 and not cloud.job("mine")["stopped"]


@pytest.mark.parametrize("moment", ["release", "start"])
def test_a_stop_in_the_middle_of_a_replacement_stands(cloud, running, monkeypatch, tmp_path, moment):
    from launch import watching
    from launch.jobs import Jobs

    running(f"[ -e {tmp_path}/second ] && exec sleep 60; touch {tmp_path}/second; exit {PREEMPTED}")
    act = getattr(watching, moment)

    def interrupted(*arguments):
        Jobs(cloud.state).change("mine", stopped=True)
        return act(*arguments)

    monkeypatch.setattr(watching, moment, interrupted)
    assert cloud.launch("watch", "mine", *QUICK) == PREEMPTED
    assert len(cloud.calls("create")) == (1 if moment == "release" else 2)


def test_all_workers_of_all_slices_run_and_have_their_logs(cloud, running, capfd):
    running('echo "on $FAKE_HOST"', on=("--slice=2xv5litepod-8", *WHERE[1:]))
    assert cloud.launch("watch", "mine", *QUICK) == 0
    assert cloud.launch("logs", "mine", "--worker=1") == 0
    told = capfd.readouterr().out
    assert "mine-1-1-w-0: on mine-1-1-w-0" in told and "mine-1-0-w-0: on" not in told
    assert cloud.launch("logs", "mine", "--worker=all") == 0
    told = capfd.readouterr().out
    assert told.index("mine-1-0-w-0: on") < told.index("mine-1-1-w-0: on")


def test_workers_that_do_not_answer_are_replaced_and_then_given_up(cloud, running, capfd):
    running("sleep 60")
    cloud.change(unreachable=True)
    assert cloud.launch("watch", "mine", *QUICK) == MISTAKE
    assert "given up after 3 tries" in capfd.readouterr().err


def test_stop_saves_and_watch_leaves_it_alone(cloud, running, tmp_path, capfd):
    running(f"trap 'exit {PREEMPTED}' TERM", f"touch {tmp_path}/up", "sleep 60 & wait")  # it leaves its sleep behind
    wait_for(tmp_path / "up")
    assert cloud.launch("stop", "mine") == 0
    assert cloud.launch("watch", "mine", *QUICK) == PREEMPTED
    assert "mine was stopped" in capfd.readouterr().out and set(cloud.resources) == {"mine-1"}
    assert cloud.launch("run", "mine") == 0, "what a run has left behind does not keep the next from starting"


def test_a_second_run_beside_a_live_one_is_refused(cloud, running, capfd):
    running("sleep 60")
    assert cloud.launch("run", "mine") == MISTAKE
    assert "refused: mine is running here" in capfd.readouterr().err


def test_a_second_watch_is_refused(cloud, running, capfd):
    from launch.jobs import Jobs

    running("sleep 60")
    with Jobs(cloud.state).watching("mine"):
        assert cloud.launch("watch", "mine", *QUICK) == MISTAKE
    assert "being watched already" in capfd.readouterr().err


def test_steps_in_a_bucket_are_counted_from_here(cloud, repository, monkeypatch, tmp_path, capfd):
    checkpoints = cloud.folder / "buckets" / "b" / "run" / "checkpoints"
    for step in ("900", "1200", "damaged_1300", "1500"):
        (checkpoints / step / "params").mkdir(parents=True)
        if step != "1500":  # its save was not finished
            (checkpoints / step / "commit_success.txt").touch()
    monkeypatch.setenv("BR_PYTHON", str(program(tmp_path / "python", "exit 0")))
    assert cloud.launch("up", "mine", *WHERE) == 0
    assert cloud.launch("run", "mine", "--workdir=gs://b/run", "--shared-disk", "--", "--gin_file=x.gin") == 0
    assert cloud.launch("watch", "mine", *QUICK) == 0
    assert "done, at step 1200" in capfd.readouterr().out


def test_down_refuses_what_carries_another_label(cloud, capfd):
    """Even if the job's file says that it is its own."""
    assert cloud.launch("up", "mine", *WHERE) == 0
    theirs = {"script": ["ACTIVE"], "labels": {"block-recurrent-owner": "else"}, "nodes": ["n"], "hosts": 1}
    cloud.change(resources={**cloud.resources, "theirs": theirs})
    file = cloud.state / "mine.json"
    file.write_text(json.dumps({**cloud.job("mine"), "created": ["theirs"]}))
    assert cloud.launch("down", "mine") == MISTAKE
    assert "theirs was not created by job mine" in capfd.readouterr().err
    assert set(cloud.resources) == {"mine-1", "theirs"}


def test_a_name_that_is_taken_is_not_adopted(cloud, capfd):
    theirs = {"script": ["ACTIVE"], "labels": {}, "nodes": ["n"], "hosts": 1}
    cloud.change(resources={"mine-1": theirs})
    assert cloud.launch("up", "mine", *WHERE) == MISTAKE
    assert "ALREADY_EXISTS" in capfd.readouterr().err and cloud.job("mine")["created"] == []
    assert cloud.launch("down", "mine") == 0 and "mine-1" in cloud.resources


def test_up_says_why_a_slice_does_not_come(cloud, capfd):
    cloud.change(scripts=[["WAITING_FOR_RESOURCES", {"state": "FAILED", "reason": "no stock"}]])
    assert cloud.launch("up", "mine", *WHERE, "--interval=0.05") == MISTAKE
    assert "mine-1 is FAILED (no stock): python -m launch down mine" in capfd.readouterr().err


def test_a_job_with_a_slice_is_not_moved(cloud, capfd):
    """Looked for elsewhere, its slice would seem gone, and be paid for ever after."""
    assert cloud.launch("up", "mine", *WHERE) == 0
    for command in ("down", "up"):
        assert cloud.launch(command, "mine", "--zone=other") == MISTAKE
        assert "mine has v5litepod-8 in z of p" in capfd.readouterr().err
    assert cloud.job("mine")["created"] == ["mine-1"]


def test_up_again_goes_on_waiting(cloud):
    assert cloud.launch("up", "mine", *WHERE) == 0
    assert cloud.launch("up", "mine") == 0
    assert len(cloud.calls("create")) == 1


@pytest.mark.parametrize(
    ("codes", "expected"),
    [
        ((0, 0), ("done", 0)),
        ((None, None), ("running", 0)),
        ((None, 0), ("ending", 0)),
        ((None, 3), ("ending", 3)),
        ((0, 3), ("ended", 3)),
        ((1, 42), ("ended", 42)),
        ((0,), ("missing", 0)),
    ],
)
def test_verdict(codes, expected):
    assert verdict([Worker(f"w-{i}", code, 0) for i, code in enumerate(codes)], 2) == expected


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("worker=w state=running step=9", Worker("w", None, 9)),
        ("worker=w state=died step=0 doing=saving at=7 of=9 age=3", Worker("w", 137, 0, Progress("saving", 7, 9, 3))),
        (
            "worker=w state=exited code=42 step=5 doing=done at=9 of=9 age=0",
            Worker("w", 42, 5, Progress("done", 9, 9, 0)),
        ),
    ],
)
def test_lines_of_workers_old_and_new_are_read(line, expected):
    assert parse_status(STATUS.fullmatch(line)) == expected


def test_the_progress_of_a_run_is_what_was_written_last():
    first, last = Progress("starting", 0, 0, 700), Progress("compiling", 0, 8, 5)
    assert newest_progress([Worker("a", None, 0, first), Worker("b", None, 0, last), Worker("c", None, 0)]) == last
    assert (str(first), str(last)) == ("starting", "compiling, step 0 of 8") and newest_progress([]) is None
