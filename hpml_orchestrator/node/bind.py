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
from hpml_orchestrator.node.rankrecord import append_record
from hpml_orchestrator.node.ranks import rank_variables
from hpml_orchestrator.placement.planfile import find, header
from hpml_orchestrator.topology.cpulist import format_list, parse_list

__all__ = ["EXIT_BINDING", "USAGE", "main", "run"]

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
        from hpml_orchestrator.node.solo import bind_alone  # noqa: PLC0415 - reads all of sysfs

        bind_alone(show=show or os.environ.get("HPML_BINDING_VERBOSE", "0") not in ("", "0"))
    return _become(command)


def _obey(attempt: str, program: str) -> int:
    """Do what the plan says of this rank, and record what came of it; 79 to end, else 0."""
    host = os.uname().nodename
    node = os.environ.get("SLURMD_NODENAME") or host.partition(".")[0]
    inherited = format_list(os.sched_getaffinity(0))
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
        "cpus": format_list(cpus),
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
        parse_list(line.get("cpus", ""))
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
    told = format_list(child)
    return told, "" if child == cpus else f"a forked child runs on CPUs {told}, not on the rank's"


def _set_cpus(wished: str) -> str:
    """Set the affinity and read it back; returns what is wrong, or the empty text.

    The kernel leaves out, without a word, what is outside of the cpuset. A rank that gets a part of
    its CPUs goes back to those that it was started with: the part may be one of many.
    """
    cpus = frozenset(parse_list(wished))
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, cpus)
        found = os.sched_getaffinity(0)
        if found == cpus:
            return ""
        os.sched_setaffinity(0, before)
        refused = f"gives {format_list(found)} alone"
    except (OSError, ValueError, OverflowError) as error:
        refused = f"refuses them: {getattr(error, 'strerror', None) or error}"
    may = f"it was started with {format_list(before)}"
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
