"""`hpml-bind [ATTEMPT] -- COMMAND`: bind this rank as planned, record it, exec the command.

It starts once per rank, perhaps ten thousand times at once from a shared file system. So the agent
does the planning, and this program only reads one line of the plan, applies it, reads the result
back from the kernel, appends one line to the node's record and executes the command in the same
process. It imports little: json, dataclasses or typing would each add a third to the start time.

It sets CPU affinity, preferred memory, OMP_NUM_THREADS (unless the job file does) and the name of
the node agent's socket. HPML_NIC with the nearest network card is only information: NCCL and
UCX choose among all visible cards, and NCCL_IB_HCA or UCX_NET_DEVICES would hide some. It does not
set KMP_AFFINITY and OMP_PROC_BIND: with PyTorch they push all loader workers onto one core.

If the job saves checkpoints, ranks ignore SIGTERM: Slurm sends it while a rank must still save, and
the node's agent ends the rank in time. A program with its own handler still gets SIGTERM.

Without an agent, as in your own batch script, `planning.bind_alone` plans for this rank.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from _json import encode_basestring_ascii  # without the rest of the json package

from hpml_orchestrator.node.kernel import child_cpus, memory_policy, prefer_memory, set_cpus
from hpml_orchestrator.placement.planfile import find, header
from hpml_orchestrator.records.process import read_stat
from hpml_orchestrator.topology.cpulist import format_list, parse_list

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

USAGE = "usage: hpml-bind [--show] [ATTEMPT] -- COMMAND [ARGUMENT]…\n"
EXIT_BINDING = 79
"""Exit status of a rank that is not bound as planned, with `verify: strict`."""

_SCHEMA_VERSION = 2
_COMMAND_CHARS = 1 << 16  # longer commands are not recorded, to keep lines short
_OTHERS_SECONDS = 2.0  # lets other ranks record their binding before the job ends
# Python ignores the first two and the script makes launchers ignore the others. An ignored signal
# stays ignored across exec, so they are reset for the command.
_DEFAULTS = (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGUSR1, signal.SIGUSR2)
_ALL_CPUS = "give the step all CPUs of the job: srun --cpu-bind=none, without --cpus-per-task"
# Rank, world size, local rank, local world size, node number; the most specific launcher first.
# SLURM_PROCID is wrong with these launchers: horovodrun starts its ranks from the batch step, where
# it is 0; Open MPI, MPICH and Intel MPI start daemons with srun, and all ranks of a node inherit
# the daemon's. MPI_LOCALRANKID is set by MPICH and Intel MPI only (Slurm's PMI also sets PMI_RANK).
_LAUNCHERS = (
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
        "",  # SLURM_NODEID is 0 on two nodes, because srun starts no daemon on the first one
    ),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", "SLURM_NODEID"),
)


def main() -> int:
    """Entry point of `hpml-bind`; the attempt comes from `$HPML_ATTEMPT_DIR`."""
    return run(sys.argv[1:])


def run(argv: list[str]) -> int:
    """Bind this rank and exec its command; returns only on an error.

    Args:
        argv: optionally `--show`, which prints a line about the binding if no agent ran;
            optionally the attempt's directory; then `--` and the command.

    Returns:
        2 for wrong usage, 79 if the rank cannot be bound but must be, 126 or 127 if the command
        cannot be executed.
    """
    if argv[:1] in (["-h"], ["--help"]):
        sys.stdout.write(USAGE)
        return 0
    show = argv[:1] == ["--show"]
    arguments = argv[1:] if show else argv
    split = arguments.index("--") if "--" in arguments else -1
    if split not in (0, 1) or split + 1 >= len(arguments):
        sys.stderr.write(USAGE)
        return 2
    if split and arguments[0].startswith("-"):  # a directory with such a name is ./-x
        sys.stderr.write(f"hpml-bind: unknown option {arguments[0]}\n{USAGE}")
        return 2
    attempt = arguments[0] if split else os.environ.get("HPML_ATTEMPT_DIR", "")
    command = arguments[split + 1 :]
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTERM,))  # `shield` blocks it
    os.environ.update(rank_variables(os.environ))
    if attempt:
        status = apply_plan(attempt, command)
        if status:
            return status
    else:
        from hpml_orchestrator.node.planning import bind_alone  # noqa: PLC0415 - reads all of sysfs

        bind_alone(show=show)
    if "HPML_STAGE_ELSEWHERE" in os.environ:
        command = _with_own_paths(command)
    return _exec(command)


def _with_own_paths(command: list[str]) -> list[str]:
    """Replace the first node's paths of staged data by this node's, also in variables."""
    import json  # noqa: PLC0415 - few jobs need these

    from hpml_orchestrator.node.environment import ELSEWHERE, node_name  # noqa: PLC0415

    for theirs, own in json.loads(os.environ.pop(ELSEWHERE)).get(node_name(), {}).items():
        command = [word.replace(theirs, own) for word in command]
        os.environ.update({name: one.replace(theirs, own) for name, one in os.environ.items()})
    return command


def rank_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE and GROUP_RANK, as torchrun sets them.

    Empty if the launcher sets RANK itself, and for a process without a launcher, as in the batch
    script, where Slurm sets SLURM_PROCID but not the step's number of tasks. GROUP_RANK is the
    node's number; if it is unknown, assume that ranks are placed in blocks.

    >>> rank_variables({"SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_STEP_NUM_TASKS": "4",
    ...     "SLURM_STEP_NUM_NODES": "2"})["LOCAL_WORLD_SIZE"]
    '2'
    """
    if "RANK" in environment:
        return {}
    for names in _LAUNCHERS:
        if all(name in environment for name in names[:4]):
            rank, size, local, here = (environment[name] for name in names[:4])
            node = environment.get(names[4]) or str(_at_least(0, rank) // _at_least(1, here))
            break
    else:
        if "SLURM_PROCID" not in environment or "SLURM_STEP_NUM_TASKS" not in environment:
            return {}
        rank, size = environment["SLURM_PROCID"], environment["SLURM_STEP_NUM_TASKS"]
        local, here = environment.get("SLURM_LOCALID", "0"), str(tasks_here(environment))
        node = environment.get("SLURM_NODEID", "0")
    return {
        "RANK": rank,
        "LOCAL_RANK": local,
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": here,
        "GROUP_RANK": node,
    }


def tasks_here(environment: Mapping[str, str]) -> int:
    """Return the number of tasks of this step on this node; 1 outside a step.

    SLURM_STEP_TASKS_PER_NODE lists it for all nodes in order, such as `4(x2),3`.

    >>> tasks_here({"SLURM_STEP_TASKS_PER_NODE": "4(x2),3", "SLURM_NODEID": "2"})
    3
    """
    node = _at_least(0, environment.get("SLURM_NODEID", ""))
    for part in environment.get("SLURM_STEP_TASKS_PER_NODE", "").split(","):
        tasks, _, times = part.partition("(x")
        node -= _at_least(1, times.rstrip(")"))
        if tasks.isdecimal() and node < 0:
            return _at_least(1, tasks)
    total = _at_least(1, environment.get("SLURM_STEP_NUM_TASKS", ""))
    return max(1, total // _at_least(1, environment.get("SLURM_STEP_NUM_NODES", "")))


def apply_plan(attempt: str, command: list[str]) -> int:
    """Bind this rank as planned and record the result.

    Args:
        attempt: the attempt's directory.
        command: of the rank, for the record; only rank 0 records the arguments.

    Returns:
        EXIT_BINDING if the rank is not bound as planned but must be, else 0.
    """
    host = os.uname().nodename
    node = os.environ.get("SLURMD_NODENAME") or host.partition(".")[0]
    inherited = format_list(os.sched_getaffinity(0))
    head, line, problem, hint = _planned(attempt, node)
    verify = head.get("verify") or os.environ.get("HPML_BINDING_VERIFY") or "warn"
    _export(head)
    bound = line.get("bind") == "yes"
    memory_problem = ""  # only recorded: the memory policy is a preference
    if bound:
        problem, hint = set_cpus(line.get("cpus", "")), _ALL_CPUS
        bound = not problem
        if line.get("mem", "").isdecimal():
            memory_problem = prefer_memory(int(line["mem"]))
        if "nic" in line:
            os.environ["HPML_NIC"] = line["nic"]
        if head.get("omp") != "keep":
            os.environ["OMP_NUM_THREADS"] = line.get("threads", "1")
    cpus = os.sched_getaffinity(0)
    child = None
    if verify != "off":
        # Forked loader workers must get the same CPUs, so check with a real child.
        child, child_problem = _child(cpus)
        problem = problem or child_problem
    # The start time distinguishes this process from a later one with the same pid.
    stat = read_stat("self")
    record: dict[str, object] = {
        "schema_version": _SCHEMA_VERSION,
        "rank": _variable("RANK", 0),
        "local_rank": _variable("LOCAL_RANK", 0),
        "world_size": _variable("WORLD_SIZE", 1),
        "node": node,
        "host": host,
        "pid": os.getpid(),
        "start_ticks": stat.start_ticks if stat else None,
        "time": round(time.time(), 6),
        "inherited": inherited,
        "cpus": format_list(cpus),
        "child_cpus": child,
        "memory": memory_policy(),
        "visible": os.environ.get("CUDA_VISIBLE_DEVICES", os.environ.get("ROCR_VISIBLE_DEVICES")),
        "threads": _variable("OMP_NUM_THREADS", None),
        "nic": os.environ.get("HPML_NIC"),
        "bound": bound,
        "error": problem,
        "note": memory_problem,
        "program": command[0],
    }
    if record["rank"] == 0 and sum(map(len, command)) < _COMMAND_CHARS:
        record["command"] = command
    try:
        _append(f"{attempt}/binding/{node}.jsonl", record)
    except OSError as error:
        sys.stderr.write(f"hpml-bind: cannot record the binding: {error}\n")
    if not problem:
        return 0
    strict = verify == "strict"
    continues = "it continues" if bound else "it continues unbound"
    end = "it ends (binding.verify: strict)" if strict else continues
    rank = f"rank {record['rank']} (local rank {record['local_rank']}) on {node}"
    sys.stderr.write(f"hpml-bind: {rank}: {problem}; {end}. Hint: {hint or _ALL_CPUS}\n")
    if strict:
        time.sleep(_OTHERS_SECONDS)
        return EXIT_BINDING
    return 0


def _planned(attempt: str, node: str) -> tuple[dict[str, str], dict[str, str], str, str]:
    path = f"{attempt}/plan/{node}.txt"
    head: dict[str, str] = {}
    try:
        with open(path, encoding="ascii") as stream:
            text = stream.read()
        head = header(text)
        local_rank = _variable("LOCAL_RANK", 0)
        if local_rank is None:
            problem = f"LOCAL_RANK is {os.environ['LOCAL_RANK']!r}, not a number"
            return head, {}, problem, "do not set LOCAL_RANK yourself"
        if local_rank >= int(head["ranks"]):
            problem = f"the plan has only {head['ranks']} ranks for this node"
            return head, {}, problem, "start as many ranks per node as in the job file"
        line = find(text, local_rank)
        parse_list(line.get("cpus", ""))
    except OSError as error:
        problem = f"the plan {path} cannot be read: {error.strerror}"
        return head, {}, problem, "see the messages of the node's agent in the output"
    except ValueError as error:
        problem = f"the plan {path} is damaged: {error}"
        return head, {}, problem, "submit again: the agent writes it at each start"
    return head, line, "", ""


def _export(head: dict[str, str]) -> None:
    if "channel" in head:
        os.environ["HPML_CHANNEL"] = head["channel"]
    if "gloo" in head:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", head["gloo"])
    for key, name in (("peak", "HPML_PEAK_TFLOPS"), ("peak_bf16", "HPML_PEAK_TFLOPS_BF16")):
        if key in head:
            os.environ.setdefault(name, head[key])
    if head.get("sigterm") == "ignore":
        signal.signal(
            signal.SIGTERM, signal.SIG_IGN
        )  # stays ignored across exec, unless the program handles it
    if "recorder" in head:
        _set_recorder(head["recorder"])


def _set_recorder(stem: str) -> None:
    """Make PyTorch record NCCL's last collectives and write them when the agent asks.

    PyTorch ends the program if it cannot create the named pipe, so create it here.
    """
    for name, value in (
        ("TORCH_NCCL_TRACE_BUFFER_SIZE", "2000"),
        ("TORCH_NCCL_DUMP_ON_TIMEOUT", "1"),
        ("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", stem),
    ):
        # `setdefault`: the user's settings take precedence.
        os.environ.setdefault(name, value)
    pipe = f"{stem}{os.environ.get('RANK', '0')}.pipe"
    try:
        if not os.path.exists(pipe):
            os.mkfifo(pipe, 0o600)
    except OSError:
        return
    os.environ.setdefault("TORCH_NCCL_DEBUG_INFO_PIPE_FILE", stem)


def _child(cpus: set[int]) -> tuple[str | None, str]:
    try:
        child = child_cpus()
    except (OSError, ValueError) as error:
        return None, f"cannot fork a child to verify the binding: {error}"
    text = format_list(child)
    return text, "" if child == cpus else f"a forked child runs on CPUs {text}, not on the rank's"


def _append(path: str, record: Mapping[str, object]) -> None:
    """Append a line of JSON with a single write, because all ranks of the node share the file."""
    pairs = ", ".join(f'"{key}": {_json(value)}' for key, value in record.items())
    with open(path, "ab", buffering=0) as stream:
        stream.write(f"{{{pairs}}}\n".encode("ascii"))


def _json(value: object) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list):
        return f"[{', '.join(map(_json, value))}]"
    return repr(value) if isinstance(value, (int, float)) else encode_basestring_ascii(str(value))


def _variable(name: str, default: int | None) -> int | None:
    text = os.environ.get(name, "")
    return (int(text) if text.isdecimal() else None) if text else default


def _at_least(least: int, text: str) -> int:
    return max(least, int(text)) if text.isdecimal() else least


def shield(argv: list[str]) -> int:
    """Exec a launcher with SIGTERM blocked, because its ranks must still save.

    Ignoring the signal is not enough, because launchers such as torchrun install a handler. Child
    processes inherit the mask, and hpml-bind unblocks the signal for the rank. A separate session
    would not help either: Slurm's ProctrackType determines which processes get a signal.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM,))
    return _exec(argv, (signal.SIGPIPE, signal.SIGXFSZ))


def _exec(command: list[str], defaults: tuple[signal.Signals, ...] = _DEFAULTS) -> int:
    """Exec the command, found as in a shell; return only on an error."""
    for number in defaults:
        signal.signal(number, signal.SIG_DFL)
    reason, status = "command not found", 127
    try:
        if command[0]:
            os.execvp(command[0], command)  # noqa: S606 - the user's own command
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (OSError, ValueError) as error:
        reason, status = getattr(error, "strerror", None) or str(error), 126
    sys.stderr.write(f"hpml-bind: {command[0]}: {reason}\n")
    return status
