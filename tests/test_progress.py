"""Progress: lines of a log by a fake clock, a bar on a terminal, silence where asked for."""

import io

import pytest
from rich.console import Console

from featherbed import progress as module
from featherbed.progress import INTERVAL, Progress, ProgressLog, show_progress, show_share


class FakeClock:
    """Time that passes when the test says so."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def log(clock, monkeypatch):
    """The log of the process, with a clock of its own; what it writes goes into a text."""
    stream = io.StringIO()
    monkeypatch.setattr(module, "LOG", ProgressLog(stream, clock=clock))
    monkeypatch.setattr(module, "POLL", 3600.0)  # the thread stays out of the way
    monkeypatch.setattr(module.time, "monotonic", clock)
    monkeypatch.setattr(
        Progress.__init__, "__kwdefaults__", Progress.__init__.__kwdefaults__ | {"clock": clock}
    )
    return stream


def test_one_line_every_fifteen_seconds(clock):
    stream = io.StringIO()
    log, progress = ProgressLog(stream, clock=clock), Progress("training", 100, clock=clock)
    log.start(progress)
    for _ in range(100):
        clock.now += 1.0
        progress.update(advance=1, note=f"loss {1 / clock.now:.3f}")
    lines = stream.getvalue().splitlines()
    assert INTERVAL == 15
    assert len(lines) == 6
    assert lines[0] == "training: 15 of 100 (15 %), loss 0.009, 0:01:25 left"
    assert lines[-1] == "training: 90 of 100 (90 %), loss 0.005, 0:00:10 left"


def test_silent_work_is_reported_too(clock):
    stream = io.StringIO()
    log = ProgressLog(stream, clock=clock)
    log.start(Progress("splitting", clock=clock))
    for _ in range(40):
        clock.now += 1.0
        log.poll()  # as the thread does
    assert stream.getvalue().splitlines() == [
        "splitting: 0:00:15 so far",
        "splitting: 0:00:30 so far",
    ]
    log.stop()
    clock.now += 100
    log.poll()
    assert len(stream.getvalue().splitlines()) == 2


def test_the_interval_runs_on_over_short_pieces_of_work(log, clock):
    for number in range(10):
        with show_progress(f"run {number}", 4) as progress:
            for _ in range(4):
                clock.now += 1
                progress.update(advance=1)
    assert log.getvalue().splitlines() == [
        "run 3: 3 of 4 (75 %), 0:00:01 left",
        "run 7: 2 of 4 (50 %), 0:00:02 left",
    ]
    clock.now += 1000  # nothing runs: what comes next does not write at once
    with show_progress("late", 4) as progress:
        clock.now += 1
        progress.update(advance=1)
    assert "late" not in log.getvalue()


def test_steps_of_an_earlier_run_do_not_count_in_the_time_left(clock):
    progress = Progress("training", 10, completed=8, clock=clock)
    clock.now += 30
    progress.update(advance=1)
    assert progress.line(clock.now) == "training: 9 of 10 (90 %), 0:00:30 left"


def test_shares_move_forward_and_the_time_follows_the_last_one(log, clock):
    with show_share("reading") as report:
        clock.now += 10
        report("comparing", 0.5)
        clock.now += 10
        report("refining", 0.25)
    assert log.getvalue() == "refining: 50 %, 0:01:00 left\n"


def test_nothing_is_shown_unless_asked_for(log, clock, capsys):
    with show_progress("quiet", 3, shown=False) as progress:
        clock.now += 100
        progress.update(advance=1)
    assert log.getvalue() == ""
    assert capsys.readouterr() == ("", "")


def test_inner_work_gives_back_to_outer_work(log, clock):
    with show_progress("outer", 2) as outer:
        with show_progress("inner", 2):
            clock.now += 1
        clock.now += 15
        outer.update(advance=1)
    assert log.getvalue().startswith("outer: 1 of 2")


def test_a_terminal_has_a_bar(monkeypatch):
    stream = io.StringIO()

    def terminal(**_settings):
        return Console(file=stream, force_terminal=True, width=120, legacy_windows=False)

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(module, "Console", terminal)
    with show_progress("ratings", 4, completed=1) as progress:
        progress.update(advance=1, note="validation 0.71")
    text = stream.getvalue()
    assert "ratings" in text and "2 of 4 (50 %)" in text and "validation 0.71" in text


def test_the_thread_writes_while_the_work_is_silent(monkeypatch):
    """With an interval of nothing the first look at the clock writes."""
    stream = io.StringIO()
    log = ProgressLog(stream, interval=0.0)
    monkeypatch.setattr(module, "LOG", log)
    monkeypatch.setattr(module, "POLL", 0.001)
    with show_progress("silent", 2):
        for _ in range(10_000):
            if stream.getvalue():
                break
            module.threading.Event().wait(0.001)
    assert stream.getvalue().startswith("silent: 0 of 2 (0 %), 0:00:00 so far")


def test_lines_go_to_stderr(clock, capsys):
    log, progress = ProgressLog(clock=clock), Progress("reading", 2, percent=True, clock=clock)
    log.start(progress)
    clock.now += 16
    progress.update(1)
    assert capsys.readouterr() == ("", "reading: 50 %, 0:00:16 left\n")


def test_training_writes_lines_when_redirected(log, clock, monkeypatch):
    from featherbed.apps.recommender import model as ratings
    from featherbed.apps.recommender.data import make_split
    from featherbed.apps.recommender.model import fit_tables
    from featherbed.apps.recommender.settings import RecommenderSettings
    from featherbed.io.records import make_ratings

    whole = ratings.train_epoch

    def slow(*given, **named):
        clock.now += 10
        return whole(*given, **named)

    monkeypatch.setattr(ratings, "train_epoch", slow)
    values = {"table.dim": 2, "table.users": "dense", "training.epochs": 4}
    settings = RecommenderSettings.from_values(values)
    fit_tables(settings, make_split(make_ratings(40, 30, 400)))
    lines = log.getvalue().splitlines()
    assert [line.split(",")[0] for line in lines] == [
        "ratings: 2 of 4 (50 %)",
        "ratings: 4 of 4 (100 %)",
    ]
    assert "validation 0" in lines[0] and lines[0].endswith("0:00:20 left")
