"""Running jobs from records, the problems of a Prometheus, and the address of a job's dashboard."""

from __future__ import annotations

import base64
import http.server
import json
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from hpml_orchestrator.errors import InputError, NotFoundError
from hpml_orchestrator.records.files import read_json, write_json
from hpml_orchestrator.runs import prometheus
from hpml_orchestrator.runs.live import LiveJobs
from hpml_orchestrator.runs.prometheus import Prometheus
from hpml_orchestrator.runs.state import job_dashboard, state_json
from hpml_orchestrator.scheduler.model import JobState, JobStatus

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from tests.unit.runs.conftest import World

GIB = 1 << 30
EMPTY = json.dumps({"status": "success", "data": {"resultType": "vector", "result": []}})
BAD_QUERY = json.dumps({"status": "error", "error": "query timed out\nin expression evaluation"})
Serve = Callable[..., Prometheus]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Starts a STAND-IN for a Prometheus: one answer to everything, for `ada` with `pass:word`."""
    servers: list[http.server.ThreadingHTTPServer] = []
    silent = threading.Event()

    def start(
        code: int = 200, text: str = EMPTY, login: str = "", *, hangs: bool = False
    ) -> Prometheus:
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                if hangs:
                    silent.wait(60)
                expected = base64.b64encode(b"ada:pass:word").decode()
                allowed = self.headers.get("Authorization") == f"Basic {expected}" or not login
                body = text.encode() if allowed else b"no"
                self.send_response(code if allowed else 401)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                """Say nothing."""

        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        servers.append(server)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        at = f"{login}@" if login else ""
        return Prometheus(f"http://{at}127.0.0.1:{server.server_port}/prefix/")

    yield start
    silent.set()
    for server in servers:
        server.shutdown()
        server.server_close()


def running(world: World, **fields: Any) -> Path:
    """A job that runs since now; returns its attempt."""
    submission = world.submit(**fields)
    world.scheduler.move("1", JobState.RUNNING)
    attempt = world.starts(submission, "1")
    write_json(attempt / "head.json", {"cluster": "main", "names": ["n1"]})
    return attempt


def live(world: World, **more: Any) -> LiveJobs:
    """What looks at all jobs of a world."""
    return LiveJobs(world.store, backends=world.backends, now=world.clock.time, **more)


def test_figures_from_records(world: World) -> None:
    """The monitor's means and peaks, the ranks' last counters, and what follows from them."""
    attempt = running(world, resources={"time": "10:00", "gpus": 2})
    gpu = {"utilization_ratio": 0.05, "memory_peak_bytes": GIB}
    hot = {**gpu, "uuid": "G1", "throttled_seconds": {"power": 300, "sw_thermal": 100}}
    job = {"mean_cpus": 7.8, "cpus": 8, "gpus_allocated": 2, "gpus_used": 1, "io_read_bytes": 8000}
    memory = {"memory_peak_bytes": 19 * GIB, "memory_limit_bytes": 20 * GIB}
    record = {"seconds": 400, "updated": 1, "job": {**job, **memory}, "gpus": [hot, gpu]}
    write_json(attempt / "nodes" / "n1.monitor.json", record)
    for step in range(5):
        for rank, wait in ((0, 7), (1, 1)):
            counters = {"samples": 640, "steps": 10, "step_seconds": 10, "data_wait_seconds": wait}
            data = {f"{name}_total": value * step for name, value in counters.items()}
            world.event(attempt, "step", rank, **data)
        world.clock.sleep(100)
    (found,) = live(world).look()
    assert (found.state, found.name, found.source) == ("RUNNING", "probe", "records")
    assert (found.elapsed_seconds, found.left_seconds) == (500, 100)
    figures = {
        "gpus": 2,
        "gpus_busy": 0.1,
        "gpus_unused": 1,
        "gpu_throttled_ratio": 0.25,
        "cpu_busy_ratio": 0.975,
        "memory_ratio": 0.95,
        "read_bytes_per_second": 20,
        "samples_per_second": 12.8,
        "data_wait_ratio": 0.4,
        "wait_spread_ratio": 0.6,
        "longest_waiting_rank": 0,
        "step_spread_ratio": 0,
    }
    assert {name: found.figures[name] for name in figures} == pytest.approx(figures)
    assert [text.partition(":")[0] for text in found.bottlenecks] == [
        "GPU unused",
        "memory",
        "throttled",
        "input-bound",
        "slow rank 0",
        "GPU idle",
        "CPU-bound",
    ]
    world.clock.sleep(3000)
    (found,) = live(world).look()
    assert (found.left_seconds, "samples_per_second" in found.figures) == (0, False)


def test_schedulers_are_asked_twice_a_minute(world: World) -> None:
    """However often one looks; new runs and ends are seen then."""
    asked = []
    original = world.scheduler.query

    def query(job_ids: Sequence[str]) -> dict[str, JobStatus]:
        asked.append(world.clock.now)
        return original(job_ids)

    world.scheduler.query = query  # type: ignore[method-assign]
    running(world)
    jobs = live(world)
    world.submit("second", array="0-1")
    seen = []
    for second in range(61):
        if second == 40:
            world.scheduler.move("1", JobState.COMPLETED, exit_code=0)
        seen.append([(job.job_id, job.state) for job in jobs.look()])
        world.clock.sleep(1)
    assert len(asked) == 3
    assert seen[0] == [("2", "PENDING"), ("1", "RUNNING")]
    assert seen[-1] == [("2", "PENDING")]


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        pytest.param({"hangs": True}, "no answer: timed out", id="slow"),
        pytest.param({"code": 404, "text": "<html>"}, "not a Prometheus: HTTP 404", id="404"),
        pytest.param({"text": "<html>"}, "not a Prometheus: the answer is no JSON", id="page"),
        pytest.param({"text": "[1]"}, "not a Prometheus: the answer is no JSON", id="other"),
        pytest.param({"code": 422, "text": BAD_QUERY}, "query timed out in expression", id="422"),
        pytest.param({"login": "ada:wrong"}, "HTTP 401: name a file", id="password"),
        pytest.param({"login": "ada:pass%3Aword"}, "no running jobs: are hpml's", id="login"),
        pytest.param({}, "no running jobs: are hpml's exporters scraped", id="empty"),
    ],
)
def test_a_prometheus_without_figures(
    world: World,
    serve: Serve,
    answer: dict[str, Any],
    problem: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One line has the reason, without the password; the jobs are still shown."""
    monkeypatch.setattr(prometheus, "TIMEOUT_SECONDS", 0.3)
    running(world)
    world.clock.sleep(500)
    jobs = live(world, prometheus=serve(**answer), user="ada")
    (found,) = jobs.look()
    assert (found.job_id, found.state, found.source) == ("1", "RUNNING", "")
    assert jobs.problem.startswith("http://127.0.0.1:")
    assert problem in jobs.problem
    assert "\n" not in jobs.problem
    assert not [one for one in ("wrong", "pass:", "pass%3A") if one in jobs.problem]


def test_a_job_that_prometheus_knows(world: World, serve: Serve) -> None:
    """It is shown by its id, rather than an ended run of that number; unknown ones are refused."""
    labels = {"cluster": "main", "jobid": "1", "user": "ada", "name": "other", "figure": "gpus"}
    series = {"metric": labels, "value": [0, "2"]}
    server = serve(text=json.dumps({"data": {"result": [series]}}))
    attempt = running(world)
    world.ends(attempt)
    world.scheduler.move("1", JobState.COMPLETED, exit_code=0)
    (ended,) = live(world, words=["1"]).look()
    assert (ended.name, ended.state) == ("probe", "COMPLETED")
    (found,) = live(world, words=["1"], prometheus=server).look()
    assert (found.name, found.state, found.source) == ("other", "RUNNING", "prometheus")
    for words in ({"prometheus": server}, {}):
        with pytest.raises(NotFoundError, match="no run .*'99'"):
            live(world, words=["99"], **words).look()


@pytest.mark.parametrize("url", ["prom:9090", "file:///etc/passwd", "http://", "ftp://u:word@x"])
def test_no_address_of_a_prometheus(url: str) -> None:
    """It is refused with an example, and a password is not repeated."""
    with pytest.raises(InputError, match="must be an http or https address") as caught:
        Prometheus(url)
    assert "word" not in str(caught.value) or "@" not in url


def profile(world: World, *lines: str) -> str:
    """Write a site profile."""
    path = world.root / "site.toml"
    path.write_text("\n".join([*lines, "[monitoring]", 'dashboards = "https://g.example.org/x/"']))
    return str(path)


def test_the_address_of_a_jobs_dashboard(world: World) -> None:
    """With the labels of the metrics and the time that the job runs, or ran."""
    site = profile(world)
    submission = world.submit()
    assert job_dashboard(world.state(submission), chosen=site) is None
    world.scheduler.move("1", JobState.RUNNING)
    attempt = world.starts(submission, "1")
    write_json(attempt / "head.json", {"cluster": "main", "names": []})
    began = int(world.clock.now * 1000)
    base = f"https://g.example.org/x/d/hpml-job?var-cluster=main&var-jobid=1&from={began}"
    state = world.state(submission)
    assert job_dashboard(state, chosen=site) == f"{base}&to=now"
    assert job_dashboard(state) is None
    assert job_dashboard(state, chosen="none") is None
    assert job_dashboard(state, chosen=str(world.root / "missing.toml")) is None
    record = read_json(submission.directory / "submit.json")
    write_json(submission.directory / "submit.json", {**record, "site": [site]})
    world.clock.sleep(60)
    world.ends(attempt)
    world.scheduler.move("1", JobState.COMPLETED, exit_code=0)
    state = world.state(submission)
    assert state_json(state)["dashboard"] == f"{base}&to={began + 60_000}"


def test_the_addresses_of_an_arrays_tasks(world: World) -> None:
    """Each task has its own job id; without a recorded cluster the profile's counts."""
    site = profile(world, 'cluster = "elbe"')
    submission = world.submit(array="0-1")
    world.scheduler.move("1_1", JobState.RUNNING)
    (_, (index, label)) = submission.runs()
    task = world.store.resolve(label)
    assert index == 1
    world.starts(task, "17")
    shown: Any = state_json(world.state(submission), chosen=site)
    assert shown["dashboard"] is None
    first, second = (row["dashboard"] for row in shown["tasks"])
    assert first is None
    assert "d/hpml-job?var-cluster=elbe&var-jobid=17&from=" in second
