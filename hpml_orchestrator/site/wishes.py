"""What a new site profile proposes: defaults of jobs, and rules for sbatch options."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpml_orchestrator.site import toml, words

if TYPE_CHECKING:
    from hpml_orchestrator.scheduler.cluster import Cluster
    from hpml_orchestrator.site.look import Look

__all__ = ["defaults", "directives"]

_EXAMPLES = """\
#[directives.mem]
#forbid = "memory follows the CPUs here: ask for more CPUs"
#[directives.gpus-per-node]
#rename = "--gres=gpu:{item}"
#[directives.exclusive]
#omit = true"""


def defaults(cluster: Cluster, here: Look | None) -> list[str]:
    """Return the section of defaults: settings where only one value can be right, else remarks."""
    lines = [
        toml.header("defaults", "resources"),
        *toml.comment("What jobs get here when they do not say: any field of a job file."),
        *_partition(cluster),
        *_account(cluster),
        *_time(cluster),
        *toml.entry("cpus_per_rank", 8, active=False, remark="loader workers included"),
        "",
        toml.header("defaults", "environment"),
    ]
    loaded, _ = words.names((here.modules or ())[:1] if here else (), "ModuleName")
    return lines + toml.entry("modules", loaded or ["cuda/12.4"], active=False)


def _partition(cluster: Cluster) -> list[str]:
    good, _ = words.names(one.name for one in cluster.partitions)
    if cluster.default_partition is not None or not good:
        return []
    if len(cluster.partitions) == 1:
        return toml.entry("partition", good[0], remark="the only one, and no default of Slurm's")
    return toml.entry(
        "partition",
        good[0],
        active=False,
        remark=f"No partition is Slurm's default here: every job must name one of "
        f"{words.shorten(good)}.",
    )


def _account(cluster: Cluster) -> list[str]:
    if cluster.associations is None:
        return toml.comment("Accounts: accounting could not be asked.")
    accounts = list(dict.fromkeys(one.account for one in cluster.associations))
    if not accounts:
        enforced = "associations" in cluster.limits.accounting_enforce
        return toml.comment(
            f"Accounts: {cluster.user or 'you'} had none"
            + (", and Slurm refuses jobs without one: ask the site's support." if enforced else ".")
        )
    default = next((one.account for one in cluster.associations if one.default), "")
    good, _ = words.names(accounts)
    if not good:
        return toml.comment(f"Accounts: {words.shorten(accounts)}.")
    if not default and len(accounts) == 1:
        return toml.entry("account", good[0], remark=f"the only one of {cluster.user or 'yours'}")
    return toml.entry(
        "account",
        default if default in good else good[0],
        active=False,
        remark=f"Of {cluster.user or 'yours'}: {words.shorten(accounts)}"
        + (f"; {default} is charged when none is named." if default else "."),
    )


def _time(cluster: Cluster) -> list[str]:
    partition = cluster.default_partition
    longest = words.duration(partition.max_seconds) if partition is not None else None
    remark = ""
    if partition is not None and longest is not None:
        most = "without a limit" if longest == "unlimited" else f"at most {longest}"
        remark = f"{partition.name}, Slurm's default: {most}"
    return toml.entry("time", "01:00:00", active=False, remark=remark)


def directives(cluster: Cluster) -> list[str]:
    """Return the rules for sbatch options: one where a fact demands it, else examples."""
    limits = cluster.limits
    lines = toml.comment(
        "Rules for sbatch options, by name: forbid (say why), omit, rename ({value}, or {item} for "
        "each part of it), default."
    )
    if not limits.memory_consumable:
        lines += toml.comment(
            "Slurm does not count memory here: --mem is taken and not enforced. What jobs use "
            "above it is taken from their neighbours."
        )
    if limits.gres_names and "gpu" not in limits.gres_names:
        lines += toml.comment("Slurm knows of no GPUs here: jobs that ask for some are refused.")
    threads = max((node.threads_per_core for node in cluster.nodes), default=1)
    examples = _EXAMPLES.split("\n")
    if limits.whole_nodes:
        lines += toml.comment(
            "Jobs get whole nodes here (select/linear), which takes GPUs by --gres alone."
        )
        lines += [
            toml.header("directives", "gpus-per-node"),
            *toml.entry("rename", "--gres=gpu:{item}"),
        ]
        examples = [*examples[:2], *examples[4:]]
    lines += examples
    if threads > 1:
        lines += toml.comment(
            f"Nodes have {threads} hardware threads per core; for one task per core:"
        )
    return [*lines, "#[directives.hint]", '#default = "nomultithread"']
