"""`hpml-bind [ATTEMPT] -- COMMAND`: become one rank where the node's plan puts it, and prove it.

Started once per rank, perhaps ten thousand times at once from a shared file system. So the node's
agent plans, and this reads one line of the plan, obeys it, reads back what the kernel made of it,
appends one line to the node's record and becomes the command in the same process. It imports next
to nothing, and `script/onefile.py` packs it with what it imports as a single module.

It sets CPU affinity, preferred memory, OMP_NUM_THREADS (unless the job file does) and the names by
which a rank finds its node's agent. HPML_NIC tells the nearest network card and nothing obeys it:
NCCL and UCX rank the cards by themselves as long as they see all of them, and NCCL_IB_HCA or
UCX_NET_DEVICES would only take the others away. KMP_AFFINITY and OMP_PROC_BIND stay alone, too:
with PyTorch they push all loader workers onto one core.

Where no agent runs, such as in anybody's own batch script, `node/solo.py` plans for this one rank.
"""

from __future__ import annotations

import os
import sys
import time

from hpml_orchestrator.node.kernel import child_cpus, memory_policy, prefer_memory, start_ticks
from hpml_orchestrator.placement.cpulist import cpu_list, cpu_numbers
from hpml_orchestrator.placement.planfile import find, header

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "EXIT_BINDING",
    "USAGE",
    "append_record",
    "json_line",
    "main",
    "rank_variables",
    "run",
    "tasks_here",
]

USAGE = "usage: hpml-bind [--show] [ATTEMPT] -- COMMAND [ARGUMENT]…\n"
EXIT_BINDING = 79
"""Exit status of a rank that is not where it should be, with `verify: strict`."""

_SCHEMA_VERSION = 2
_PLAN_BYTES = 1 << 20
_OTHERS_SECONDS = 2.0  # so that the other ranks record theirs, too, before the job is ended
_ALL_CPUS = "give the step all CPUs of the job: srun --cpu-bind=none, without --cpus-per-task"


def main() -> int:
    """Entry point of `hpml-bind`; the attempt comes from `$HPML_ATTEMPT_DIR`."""
    return run(sys.argv[1:])


def run(argv: list[str]) -> int:
    """Bind this rank and exec its command; returns only on an error.

    Args:
        argv: optionally `--show`, which tells in a line what is done where no agent ran; optionally
            the attempt's directory; then `--` and the command.

    Returns:
        2 for wrong usage, 79 where the rank cannot be bound and must be, 126 or 127 when the
        command cannot be executed.
    """
    if argv[:1] in (["-h"], ["--help"]):
        sys.stdout.write(USAGE)
        return 0
    show = argv[:1] == ["--show"]
    words = argv[1:] if show else argv
    split = words.index("--") if "--" in words else -1
    if split not in (0, 1) or split + 1 >= len(words):
        sys.stderr.write(USAGE)
        return 2
    if split and words[0].startswith("-"):  # a directory of such a name is ./-x
        sys.stderr.write(f"hpml-bind: there is no option {words[0]}\n{USAGE}")
        return 2
    attempt = words[0] if split else os.environ.get("HPML_ATTEMPT_DIR", "")
    command = words[split + 1 :]
    os.environ.update(rank_variables(os.environ))
    if attempt:
        status = _obey(attempt, command[0])
        if status:
            return status
    else:
        from hpml_orchestrator.node.planning import bind_alone  # noqa: PLC0415 - reads all of sysfs

        bind_alone(show=show or os.environ.get("HPML_BINDING_VERBOSE", "0") not in ("", "0"))
    return _become(command)


def _obey(attempt: str, program: str) -> int:
    """Do what the plan says of this rank, and record what came of it; 79 to end, else 0."""
    host = os.uname().nodename
    node = os.environ.get("SLURMD_NODENAME") or host.partition(".")[0]
    inherited = cpu_list(os.sched_getaffinity(0))
    head, line, problems, hint = _planned(attempt, node)
    verify = head.get("verify") or os.environ.get("HPML_BINDING_VERIFY") or "warn"
    _tell_agent(attempt, head.get("channel", ""))
    _tell_parts(head.get("parts", ""))
    bound = line.get("bind") == "yes"
    minor = ""  # what is recorded and never ends a job: a preference is no promise
    if bound:
        problems, minor = _set(head, line)
        bound, hint = not problems, _ALL_CPUS
    cpus = os.sched_getaffinity(0)
    child, unproven = _proof(cpus) if verify != "off" else (None, "")
    problems = problems or unproven
    record = {
        "schema_version": _SCHEMA_VERSION,
        "rank": _variable("RANK", 0),
        "local_rank": _variable("LOCAL_RANK", 0),
        "world_size": _variable("WORLD_SIZE", 1),
        "node": node,
        "host": host,
        "pid": os.getpid(),
        "start_ticks": start_ticks(),
        "time": round(time.time(), 6),
        "inherited": inherited,
        "cpus": cpu_list(cpus),
        "child_cpus": child,
        "memory": memory_policy(),
        "visible": os.environ.get("CUDA_VISIBLE_DEVICES", os.environ.get("ROCR_VISIBLE_DEVICES")),
        "threads": _variable("OMP_NUM_THREADS", None),
        "nic": os.environ.get("HPML_NIC"),
        "bound": bound,
        "error": problems,
        "note": minor,
        "program": program,
    }
    try:
        append_record(f"{attempt}/binding/{node}.jsonl", record)
    except OSError as error:
        sys.stderr.write(f"hpml-bind: cannot record the binding: {error}\n")
    if not problems:
        return 0
    strict = verify == "strict"
    goes_on = "it goes on" if bound else "it goes on unbound"
    end = "it ends (binding.verify: strict)" if strict else goes_on
    who = f"rank {record['rank']} (local rank {record['local_rank']}) on {node}"
    sys.stderr.write(f"hpml-bind: {who}: {problems}; {end}. Hint: {hint or _ALL_CPUS}\n")
    if strict:
        time.sleep(_OTHERS_SECONDS)
        return EXIT_BINDING
    return 0


def _planned(attempt: str, node: str) -> tuple[dict[str, str], dict[str, str], str, str]:
    """Return the plan's header, this rank's line, what is wrong with them, and what to do then."""
    path = f"{attempt}/plan/{node}.txt"
    head: dict[str, str] = {}
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            text = os.read(descriptor, _PLAN_BYTES).decode("ascii")
        finally:
            os.close(descriptor)
        head = header(text)
        local_rank = _variable("LOCAL_RANK", 0)
        if local_rank is None:
            wrong = os.environ["LOCAL_RANK"]
            return head, {}, f"LOCAL_RANK is {wrong!r}, no number", "whoever set it must not"
        if local_rank >= int(head["ranks"]):
            problem = f"the plan has {head['ranks']} ranks for this node, and not this one"
            return head, {}, problem, "start as many ranks on each node as the job file says"
        line = find(text, local_rank)
        cpu_numbers(line.get("cpus", ""))
    except OSError as error:
        problem = f"the plan {path} cannot be read: {error.strerror}"
        return head, {}, problem, "see in the output what the node's agent says"
    except ValueError as error:
        problem = f"the plan {path} is damaged: {error}"
        return head, {}, problem, "the agent writes it anew with the next start: submit again"
    return head, line, "", ""


def _tell_agent(attempt: str, channel: str) -> None:
    """Tell the rank where this node's agent listens, and which file asks it to stop."""
    if not channel:
        try:
            from hpml_orchestrator.node.names import attempt_channel  # noqa: PLC0415 - hashes
        except ImportError:
            return
        channel = attempt_channel(os.environ, attempt)
    os.environ["HPML_CHANNEL"] = channel
    os.environ["HPML_STOP_FILE"] = f"{attempt}/stop"


def _tell_parts(told: str) -> None:
    """Tell the rank which part of staged data this node has: HPML_PART_TRAIN=0/4."""
    part, _, names = told.partition(":")
    for name in filter(None, names.split(",")):
        os.environ[f"HPML_PART_{name.upper()}"] = part


def _set(head: dict[str, str], line: dict[str, str]) -> tuple[str, str]:
    """Set what this rank's line says; returns what is wrong with its CPUs, and with its memory."""
    if "nic" in line:
        os.environ["HPML_NIC"] = line["nic"]
    if head.get("omp") != "keep":
        os.environ["OMP_NUM_THREADS"] = line.get("threads", "1")
    problem = _set_cpus(line.get("cpus", ""))
    return problem, prefer_memory(int(line["mem"])) if line.get("mem", "").isdecimal() else ""


def _proof(cpus: set[int]) -> tuple[str | None, str]:
    """Return the CPUs of a forked child, and what is wrong with them."""
    try:
        child = child_cpus()
    except (OSError, ValueError) as error:
        return None, f"no child can be forked to prove the binding: {error}"
    told = cpu_list(child)
    return told, "" if child == cpus else f"a forked child runs on CPUs {told}, not on the rank's"


def _set_cpus(wished: str) -> str:
    """Set the affinity and read it back; returns what is wrong, or the empty text.

    The kernel leaves out, without a word, what is outside of the cpuset. A rank that gets a part of
    its CPUs goes back to those that it was started with: the part may be one of many.
    """
    cpus = frozenset(cpu_numbers(wished))
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, cpus)
        found = os.sched_getaffinity(0)
        if found == cpus:
            return ""
        os.sched_setaffinity(0, before)
        refused = f"gives {cpu_list(found)} alone"
    except (OSError, ValueError, OverflowError) as error:
        refused = f"refuses them: {getattr(error, 'strerror', None) or error}"
    may = f"it was started with {cpu_list(before)}"
    return f"the plan wishes CPUs {wished or 'none'}, the kernel {refused}; {may}"


def _variable(name: str, default: int | None) -> int | None:
    """A variable as a number; the default where it is not set, None where it is no number."""
    text = os.environ.get(name, "")
    return (int(text) if text.isdecimal() else None) if text else default


def _become(command: list[str]) -> int:
    """Exec the command as a shell finds it; returns only on an error."""
    try:
        import _signal as signal  # type: ignore[import-not-found] # noqa: PLC0415 - no enums
    except ImportError:
        import signal  # noqa: PLC0415
    # Python ignores the first two, the script has launchers ignore the others, and what is ignored
    # stays so across exec: not for the command.
    for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_DFL)
    program = command[0]
    reason = "" if program else "command not found"
    # os.execvp would import the module warnings.
    path = os.environ.get("PATH", os.defpath)
    for directory in [""] if "/" in program else path.split(":"):
        try:
            os.execv(f"{directory}/{program}" if directory else program, command)  # noqa: S606
        except (FileNotFoundError, NotADirectoryError):
            continue
        except (OSError, ValueError) as error:
            reason = reason or getattr(error, "strerror", None) or str(error)
    sys.stderr.write(f"hpml-bind: {program}: {reason or 'command not found'}\n")
    return 127 if reason in ("", "command not found") else 126


_LAUNCHERS = (
    # Rank, world size, local rank, local world size, node's number. Most particular first:
    # horovodrun starts its ranks from the batch step, whose SLURM_PROCID is 0 everywhere; Open
    # MPI's daemons are tasks of an srun, whose SLURM_PROCID all ranks of one node inherit; MPICH's
    # and Intel's too, which alone set MPI_LOCALRANKID (Slurm's own PMI sets PMI_RANK as well).
    (
        "HOROVOD_RANK",
        "HOROVOD_SIZE",
        "HOROVOD_LOCAL_RANK",
        "HOROVOD_LOCAL_SIZE",
        "HOROVOD_CROSS_RANK",
    ),
    (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        "",  # its srun starts daemons on all nodes but the first, so SLURM_NODEID is 0 on two
    ),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", "SLURM_NODEID"),
)


def rank_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE and GROUP_RANK, as torchrun sets them.

    Empty where a launcher has set RANK itself, and for a process that no launcher started, such as
    one of the batch script: Slurm sets SLURM_PROCID there, too, but no number of tasks in the step.
    GROUP_RANK is the node's number; where it is not told, ranks are taken to be in blocks.

    >>> rank_variables({"SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_STEP_NUM_TASKS": "4",
    ...     "SLURM_STEP_NUM_NODES": "2"})["LOCAL_WORLD_SIZE"]
    '2'
    """
    if "RANK" in environment:
        return {}
    for names in _LAUNCHERS:
        if all(name in environment for name in names[:4]):
            rank, size, local, here = (environment[name] for name in names[:4])
            node = environment.get(names[4]) or str(_whole(rank, 0) // _whole(here, 1))
            return _variables(rank, local, size, here, node)
    if "SLURM_PROCID" not in environment or "SLURM_STEP_NUM_TASKS" not in environment:
        return {}
    return _variables(
        environment["SLURM_PROCID"],
        environment.get("SLURM_LOCALID", "0"),
        environment["SLURM_STEP_NUM_TASKS"],
        str(tasks_here(environment)),
        environment.get("SLURM_NODEID", "0"),
    )


def tasks_here(environment: Mapping[str, str]) -> int:
    """Return how many tasks of this step run on this node; 1 outside of a step.

    SLURM_STEP_TASKS_PER_NODE tells it for each node in order, such as `4(x2),3`.

    >>> tasks_here({"SLURM_STEP_TASKS_PER_NODE": "4(x2),3", "SLURM_NODEID": "2"})
    3
    """
    node = _whole(environment.get("SLURM_NODEID", ""), 0)
    for part in environment.get("SLURM_STEP_TASKS_PER_NODE", "").split(","):
        tasks, _, times = part.partition("(x")
        node -= _whole(times.rstrip(")"), 1)
        if tasks.isdecimal() and node < 0:
            return _whole(tasks, 1)
    total = _whole(environment.get("SLURM_STEP_NUM_TASKS", ""), 1)
    return max(1, total // _whole(environment.get("SLURM_STEP_NUM_NODES", ""), 1))


def _variables(rank: str, local: str, size: str, here: str, node: str) -> dict[str, str]:
    return {
        "RANK": rank,
        "LOCAL_RANK": local,
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": here,
        "GROUP_RANK": node,
    }


def _whole(text: str, least: int) -> int:
    """A number that a launcher wrote; the least that it can be where it is none."""
    return max(least, int(text)) if text.isdecimal() else least


_BMP_END = 0x10000


def append_record(path: str, record: Mapping[str, object]) -> None:
    """Append a line to a node's file.

    All ranks of the node share the file: one write each, so that none comes into another's line.

    Raises:
        OSError: the file cannot be written.
    """
    line = json_line(record).encode("ascii")
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        if os.write(descriptor, line) != len(line):
            raise OSError(f"{path}: a line could be written in part only")
    finally:
        os.close(descriptor)


def json_line(record: Mapping[str, object]) -> str:
    r"""Return a flat record as a line of JSON in ASCII.

    >>> json_line({"rank": 3, "bound": True, "nic": None, "program": 'a"\u00e9'})
    '{"rank": 3, "bound": true, "nic": null, "program": "a\\"\\u00e9"}\n'
    """
    pairs = ", ".join(f'"{key}": {_value(value)}' for key, value in record.items())
    return f"{{{pairs}}}\n"


def _value(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)
    return '"' + "".join(map(_letter, str(value))) + '"'


def _letter(letter: str) -> str:
    if " " <= letter <= "~" and letter not in '"\\':
        return letter
    if letter in '"\\':
        return "\\" + letter
    code = ord(letter)
    if code < _BMP_END:
        return f"\\u{code:04x}"
    code -= _BMP_END
    return f"\\u{0xD800 + (code >> 10):04x}\\u{0xDC00 + (code & 0x3FF):04x}"
