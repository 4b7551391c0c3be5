"""Whether enough nodes have all that a job asks for at once, node by node."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hpml_orchestrator.check import constraint as constraints
from hpml_orchestrator.check.ask import Ask, candidates, cpus_needed, memory_needed
from hpml_orchestrator.check.finding import Finding, listed
from hpml_orchestrator.check.partition import cpu_words, memory_words
from hpml_orchestrator.errors import did_you_mean
from hpml_orchestrator.scheduler.cluster import Cluster, Node, Partition
from hpml_orchestrator.spec.values import size_text

__all__ = ["Fit", "fit", "unknown_things"]


@dataclass(frozen=True)
class Fit:
    """What came of the comparison.

    Attributes:
        nodes: that have all that is asked for, whatever their state.
        enough: whether they will do together.
        findings: what is missing, where they do not.
    """

    nodes: list[Node]
    enough: bool
    findings: list[Finding]


@dataclass(frozen=True)
class _Need:
    """One thing that a node must have: of which field, how it is said, and how much a node has."""

    name: str
    field: str
    words: str
    has: Callable[[Node], bool]
    amount: Callable[[Node], int] | None = None
    least: int = 0
    show: Callable[[int], str] = str


def fit(ask: Ask, partition: Partition, cluster: Cluster) -> Fit:
    """Compare a job with the nodes of a partition."""
    nodes = candidates(ask, partition, cluster)
    needs = _needs(ask, partition, cluster)

    def those(wanted: Sequence[_Need]) -> list[Node]:
        return [node for node in nodes if all(need.has(node) for need in wanted)]

    fitting = those(needs)
    if _enough(ask, fitting):
        return Fit(fitting, True, [])
    alone = [need for need in needs if len(those([need])) < ask.nodes]
    dropped = sum(node.name in ask.excluded for node in cluster.nodes_of(partition))
    if len(nodes) < ask.nodes <= len(nodes) + dropped:
        findings = [_excluded(ask, partition, len(nodes))]
    elif alone:
        findings = [_missing(ask, partition, need, nodes) for need in alone]
    else:
        findings = [_together(ask, partition, needs, nodes, fitting)]
    return Fit(fitting, False, findings)


def unknown_things(ask: Ask, cluster: Cluster) -> list[Finding]:
    """Return what no node of the whole cluster has: GPUs, types of them, features, node names."""
    return [
        *_unknown_gpus(ask, cluster),
        *_unknown_features(ask, cluster),
        *_unknown_nodes(ask, cluster),
    ]


def _enough(ask: Ask, nodes: Sequence[Node]) -> bool:
    names = {node.name for node in nodes}
    if len(nodes) < ask.nodes or not ask.required <= names:
        return False
    wish = ask.job.resources.constraint
    if not wish:
        return True
    return constraints.matches(wish, [node.features for node in nodes], ask.nodes) is not False


def _needs(ask: Ask, partition: Partition, cluster: Cluster) -> list[_Need]:
    resources = ask.job.resources
    cpus = cpus_needed(ask, partition, cluster.limits)
    memory = memory_needed(ask, partition, cluster.limits)
    whole = partition.exclusive or resources.exclusive
    most = partition.max_cpus_per_node

    def cpus_of(node: Node) -> int:
        if most is None:
            return node.cpus
        # A whole node of which not all CPUs may be had is none that Slurm would give.
        return (0 if whole else most) if most < node.cpus else node.cpus

    needs = [
        _Need(
            "cpus",
            "resources.memory" if cpus > ask.cpus else "resources.cpus_per_rank",
            cpu_words(ask, partition, cluster),
            lambda node: cpus_of(node) >= cpus,
            cpus_of,
            cpus,
        )
    ]
    if memory:
        needs.append(
            _Need(
                "memory",
                "resources.memory",
                memory_words(ask, memory),
                lambda node: node.memory_mib >= memory,
                lambda node: node.memory_mib,
                memory,
                size_text,
            )
        )
    if ask.disk_mib:
        needs.append(
            _Need(
                "disk",
                "stage",
                f"{size_text(ask.disk_mib)} of local disk for what is staged",
                # 0: the site does not say, and nobody can know.
                lambda node: not node.tmp_disk_mib or node.tmp_disk_mib >= ask.disk_mib,
                lambda node: node.tmp_disk_mib,
                ask.disk_mib,
                size_text,
            )
        )
    needs += [_gpu_need(kind, count) for kind, count in ask.gpus]
    wish = resources.constraint
    alone = constraints.per_node(wish) if wish else None
    if wish and alone is not None:
        test = alone
        needs.append(
            _Need(
                "features",
                "resources.constraint",
                f"features {wish}",
                lambda node: test(node.features),
            )
        )
    return needs


def _gpu_need(kind: str, count: int) -> _Need:
    noun = f"GPU{'s' * (count != 1)} of type {kind}" if kind else f"GPU{'s' * (count != 1)}"
    return _Need(
        "gpus",
        "resources.gpus",
        f"{count} {noun} per node",
        lambda node: node.gpus(kind) >= count,
        lambda node: node.gpus(kind),
        count,
    )


def _value(ask: Ask, field: str) -> object:
    if field == "stage":
        return size_text(ask.disk_mib)
    return getattr(ask.job.resources, field.rpartition(".")[2])


def _excluded(ask: Ask, partition: Partition, left: int) -> Finding:
    """Too few nodes are left, whatever they have."""
    return Finding(
        "error",
        "nodes.excluded",
        "resources.extra",
        f"--exclude={','.join(sorted(ask.excluded))}",
        f"without the excluded nodes {_count(left)} of partition {partition.name} "
        f"{'is' if left == 1 else 'are'} left; {ask.nodes} needed",
        left,
        "exclude fewer nodes, or name another partition",
    )


def _missing(ask: Ask, partition: Partition, need: _Need, nodes: Sequence[Node]) -> Finding:
    """One need that too few nodes meet, whatever else is asked for."""
    have = sum(map(need.has, nodes))
    where = f"of partition {partition.name}"
    if need.amount is None:
        others = sorted({feature for node in nodes for feature in node.features})
        return Finding(
            "error",
            f"{need.name}.nodes",
            need.field,
            _value(ask, need.field),
            f"{_count(have)} {where} {'has' if have < 2 else 'have'} {need.words}; "  # noqa: PLR2004
            f"{ask.nodes} needed",
            have,
            f"features there: {listed(others)}",
        )
    most = _largest(need, nodes, ask.nodes)
    one = ask.nodes == 1
    if most:
        says = f"no node {where} has more than {need.show(most)}"
        if not one:
            says = f"{ask.nodes} nodes {where} have at most {need.show(most)} each"
        hint = f"ask for at most {need.show(most)}"
        if need.name == "cpus" and need.field == "resources.memory":
            hint = "ask for less memory per node"
        elif need.name == "disk":
            hint = "stage less, or to shm, or to a directory by its path"
        if have:
            hint += f", or for at most {have} node{'s' * (have != 1)}"
    else:
        says = f"no node {where} has any"
        if need.name == "cpus":
            says = (
                f"partition {partition.name} gives no whole node: "
                f"at most {partition.max_cpus_per_node} CPUs of each"
            )
        elif have:
            says = f"only {_count(have)} {where} {'has' if have == 1 else 'have'} that"
        hint = "name another partition"
        if have:
            hint = f"ask for at most {have} node{'s' * (have != 1)}"
    return Finding(
        "error",
        f"{need.name}.most",
        need.field,
        _value(ask, need.field),
        f"this job asks for {need.words}; {says}",
        need.show(most),
        hint,
    )


def _together(
    ask: Ask,
    partition: Partition,
    needs: Sequence[_Need],
    nodes: Sequence[Node],
    fitting: Sequence[Node],
) -> Finding:
    """Needs that can each be met, but not all of them on the same nodes."""
    missing = sorted(ask.required - {node.name for node in fitting})
    if missing:
        return Finding(
            "error",
            "nodes.required",
            "resources.extra",
            f"--nodelist={','.join(sorted(ask.required))}",
            f"{listed(missing)} of partition {partition.name} cannot take this job",
            hint="leave --nodelist out",
        )
    wish = ask.job.resources.constraint
    counted = bool(wish) and constraints.per_node(wish or "") is None
    ways = []
    for need in needs:
        rest = [n for n in nodes if all(other.has(n) for other in needs if other is not need)]
        if not _enough(ask, rest):
            continue
        most = _largest(need, rest, ask.nodes) if need.amount else 0
        what = need.field.rpartition(".")[2]
        ways.append(f"`{what}` of at most {need.show(most)}" if most else f"another `{what}`")
    if fitting and not counted:
        ways.append(f"at most {len(fitting)} node{'s' * (len(fitting) != 1)}")
    asked = [need.words for need in needs if need.amount is None or need.least > 1]
    if counted:
        asked.append(f"features {wish}")
    return Finding(
        "error",
        "features.nodes" if counted else "nodes.together",
        "resources.constraint" if counted else "resources.nodes",
        wish if counted else ask.nodes,
        f"partition {partition.name} has too few nodes with {listed(asked)} at once: "
        f"{len(fitting)} of them, {ask.nodes} needed"
        if not counted
        else f"partition {partition.name} has no {ask.nodes} nodes with {listed(asked)} at once",
        len(fitting),
        f"what would do: {listed(ways, last='or')}" if ways else "ask for less",
    )


def _largest(need: _Need, nodes: Sequence[Node], count: int) -> int:
    """Return the most of something that `count` nodes have."""
    if need.amount is None or len(nodes) < count:
        return 0
    return sorted(map(need.amount, nodes), reverse=True)[count - 1]


def _count(number: int) -> str:
    return f"{number or 'no'} node{'s' * (number > 1)}"


def _unknown_gpus(ask: Ask, cluster: Cluster) -> list[Finding]:
    if not ask.gpus or not cluster.nodes:
        return []
    value = ask.job.resources.gpus
    types: dict[str, int] = {}
    for node in cluster.nodes:
        for one in node.gres:
            if one.name == "gpu":
                types[one.kind] = max(types.get(one.kind, 0), one.count)
    if not types:
        return [
            Finding(
                "error",
                "gpus.none",
                "resources.gpus",
                value,
                "this cluster has no GPUs that Slurm knows of",
                0,
                "leave `gpus` out",
            )
        ]
    found = []
    for kind, _ in ask.gpus:
        if not kind or kind in types:
            continue
        profile = "g." in kind
        same = [one for one in types if ("g." in one) == profile and one]
        word = "MIG profile" if profile else "type of GPU"
        there = listed([f"{one}:{types[one]}" for one in sorted(same)])
        hint = "" if profile else did_you_mean(kind, same)
        others = [f"{one}:{types[one]}" for one in sorted(types) if one]
        found.append(
            Finding(
                "error",
                "gpus.type",
                "resources.gpus",
                value,
                f"no node has the {word} {kind}; per node there are "
                + (
                    there
                    if same
                    else f"no such profiles, only {listed(others)}"
                    if profile
                    else listed(others, none="GPUs without a type")
                ),
                sorted(types),
                hint or ("ask for one of these" if others else "leave the type out"),
            )
        )
    return found


def _unknown_features(ask: Ask, cluster: Cluster) -> list[Finding]:
    wish = ask.job.resources.constraint
    if not wish or not cluster.nodes:
        return []
    wrong = constraints.malformed(wish)
    if wrong:
        return [Finding("error", "features.form", "resources.constraint", wish, wrong)]
    known = sorted({feature for node in cluster.nodes for feature in node.features})
    return [
        Finding(
            "error",
            "features.unknown",
            "resources.constraint",
            wish,
            f"no node has the feature {name}; there are {listed(known)}",
            known,
            did_you_mean(name, known) or ("ask for one of these" if known else "leave it out"),
        )
        for name in constraints.features_of(wish)
        if name not in known
    ]


def _unknown_nodes(ask: Ask, cluster: Cluster) -> list[Finding]:
    if not cluster.nodes:
        return []
    known = {node.name for node in cluster.nodes}
    return [
        Finding(
            "error",
            "nodes.unknown",
            "resources.extra",
            name,
            f"there is no node {name}",
            hint=did_you_mean(name, known) or "`sinfo --Node` lists them",
        )
        for name in sorted((ask.required | ask.excluded) - known)
    ]
