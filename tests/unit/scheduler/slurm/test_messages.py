"""What Slurm's complaints mean; the texts are those of a real 22.05.8 unless marked."""

from __future__ import annotations

import pytest

from hpml_orchestrator.scheduler.slurm.messages import (
    clean,
    explain,
    final_refusal,
    hint_for,
    no_such_job,
    not_configured,
    transport_fault,
)

FAILED = "sbatch: error: Batch job submission failed: "
POLICY = (
    FAILED + "Job violates accounting/QOS policy (job submit limit, user's size and/or time "
    "limits)\n"
)
REFUSALS = [
    (
        "sbatch: error: invalid partition specified: x\n" + FAILED + "Invalid partition name "
        "specified\n",
        "partition",
    ),
    (FAILED + "Requested node configuration is not available\n", "smaller"),
    (
        "sbatch: error: Memory specification can not be satisfied\n" + FAILED + "Requested node "
        "configuration is not available\n",
        "memory",
    ),
    ("sbatch: error: AssocMaxSubmitJobLimit\n" + POLICY, "submit fewer"),
    ("sbatch: error: QOSMaxSubmitJobPerUserLimit\n" + POLICY, "submit fewer"),
    ("sbatch: error: QOSMinGRES\n" + POLICY, "ask for more"),
    ("sbatch: error: QOSMaxWallDurationPerJobLimit\n" + POLICY, "less time"),
    ("sbatch: error: QOSMaxNodePerJobLimit\n" + POLICY, "ask for less;"),
    ("sbatch: error: Invalid generic resource (gres) specification\n", "GPUs"),
    ("sbatch: error: Invalid --mem specification\n", "memory"),
    ("sbatch: error: Invalid --time specification\n", ""),
    ("sbatch: error: Unable to open file /nonexist.sh\n", ""),
    ("sbatch: unrecognized option '--foo'\nTry \"sbatch --help\" for more information\n", ""),
    (FAILED + "Invalid feature specification\n", "features"),
    (FAILED + "Requested reservation is invalid\n", "reserved"),
    (FAILED + "Invalid node name specified\n", "nodes"),
    (FAILED + "Invalid job array specification\n", "MaxArraySize"),
    ("sbatch: error: Batch script is empty!\n", "script"),
    ("sbatch: error: Batch script contains DOS line breaks (\\r\\n)\n", "script"),
    ("sbatch: fatal: Unable to process configuration file slurm.conf\n", "SLURM_CONF"),
    (POLICY, "a limit of your account or QOS"),
    # Texts of src/common/slurm_errno.c that this machine could not be made to say:
    (FAILED + "Invalid account or account/partition combination specified\n", "account"),
    (FAILED + "Invalid qos specification\n", "QOS"),
    (FAILED + "Requested time limit is invalid (missing or exceeds some limit)\n", "time"),
    (FAILED + "Node count specification invalid\n", "fewer nodes"),
    (FAILED + "Unspecified error\n", ""),
]

UNKNOWNS = [
    FAILED + "Socket timed out on send/recv operation\n",
    FAILED + "Unable to contact slurm controller (connect failure)\n",
    'sbatch: error: Munge encode failed: Failed to connect to "munge.socket": Connection '
    "refused\n" + FAILED + "Protocol authentication error\n",
    # From slurm_errno.c:
    FAILED + "Zero Bytes were transmitted or received\n",
    FAILED + "Slurm backup controller in standby mode\n",
    FAILED + "Unexpected message received\n",
    FAILED + "Communication connection failure\n",
    "sbatch: error: Slurm temporarily unable to accept job, sleeping and retrying\n",
    # A client without slurm.conf whose slurmd or controller is down belongs to a cluster:
    (
        "sbatch: error: fetch_config: Unable to contact slurm controller (connect failure)\n"
        "sbatch: fatal: Could not establish a configuration source\n"
    ),
]  # fmt: skip


@pytest.mark.parametrize(("text", "hint"), REFUSALS)
def test_refused_for_certain(text: str, hint: str) -> None:
    """A refusal keeps Slurm's own words and gets the right hint."""
    assert not transport_fault(text)
    assert hint in hint_for(text)
    assert bool(hint) == bool(hint_for(text)) or "time" in text
    assert "sbatch: " not in clean(text)
    if "(gres)" not in text:  # printed before the request; only the exit status makes it certain
        assert final_refusal(text) == clean(text)


@pytest.mark.parametrize("text", UNKNOWNS)
def test_nobody_knows(text: str) -> None:
    """After a lost answer no message counts as a refusal."""
    assert transport_fault(text)
    assert not not_configured(text)
    assert final_refusal(text) is None


@pytest.mark.parametrize(
    "text",
    [
        "",
        FAILED + "Invalid account",  # torn
        "sbatch: fatal: Could not establish a configuration source",  # torn
        "sbatch: error: some site's own remark\n",
        "sbatch: warning: can't run 1 processes on 2 nodes, setting nnodes to 1\n",
    ],
)
def test_not_certain(text: str) -> None:
    """A torn line, a remark or nothing at all is not a certain refusal."""
    assert final_refusal(text) is None


def test_no_such_job() -> None:
    """Only complaints about ids that nobody knows are passed over."""
    assert no_such_job("slurm_load_jobs error: Invalid job id specified\n")
    assert no_such_job(
        "scancel: error: Kill job error on job id 2: Job/step already completing or completed\n"
    )
    assert not no_such_job("")
    assert not no_such_job("scancel: error: Kill job error on job id 2: Access/permission denied\n")
    assert not no_such_job("slurm_load_jobs error: Invalid job id specified\nmore\n")


@pytest.mark.parametrize(
    ("reason", "text"),
    [
        ("JobHeldUser", "you hold it; `scontrol release 7` lets it start"),
        ("JobHeldAdmin", "who alone can release it"),
        ("JobHoldMaxRequeue", "requeued too often and held; once the cause is mended"),
        ("job requeued in held state", "`scontrol release 7`"),  # of SPECIAL_EXIT, too
        ("launch failed requeued held", "`scontrol release 7`"),
        ("BeginTime", "begin time"),
        ("Resources", "in use"),
        (
            (
                "Nodes required for job are DOWN, DRAINED or reserved for jobs in higher priority "
                "partitions"
            ),
            "`sinfo --list-reasons`",
        ),
        ("ReqNodeNotAvail, UnavailableNodes:node2", "`sinfo --list-reasons`"),
        ("ReqNodeNotAvail, Reserved for maintenance", "`scontrol show reservation`"),
        ("PartitionDown", "starts no jobs now"),
        ("QOSMaxJobsPerUserLimit", "as many jobs run as"),
        ("AssocMaxJobsLimit", "as many jobs run as"),
        ("QOSGrpJobsLimit", "as many jobs run as"),
        ("AssocMaxCpuMinutesPerJobLimit", "size times time limit"),
        ("QOSMaxWallDurationPerJobLimit", "ask for less time"),
        ("QOSMaxGRESPerUser", "running jobs fill a limit"),
    ],
)
def test_why_a_job_waits(reason: str, text: str) -> None:
    """Slurm's word, what it means and what to do; a text that is not known stays as it is."""
    assert explain(reason, "7").startswith(f"{reason}: ")
    assert text in explain(reason, "7")
    assert explain(f"New{reason}", "7") == f"New{reason}" or "requeued" in reason
