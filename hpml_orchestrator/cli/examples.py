"""Command lines to learn from, by command: for the manual, and for those who forgot an argument."""

from __future__ import annotations

__all__ = ["EXAMPLES"]

EXAMPLES: dict[str, list[tuple[str, str]]] = {
    "": [
        ("Train here, and see the summary at the end:", "hpml run --local job.yaml"),
        ("Submit to Slurm and come back later:", "hpml submit job.yaml"),
        ("Keep records elsewhere:", "hpml --records /scratch/ada/hpml list"),
    ],
    "render": [
        ("Print the script:", "hpml render job.yaml"),
        (
            "Say where each value came from, with four nodes:",
            "hpml render job.yaml --set resources.nodes=4 --explain",
        ),
        ("Write what sbatch needs, to be edited by hand:", "hpml render job.yaml -o by-hand"),
    ],
    "submit": [
        ("Submit a job:", "hpml submit job.yaml"),
        (
            "With other values than the job file's:",
            "hpml submit job.yaml -s resources.nodes=2 -s resources.time=90",
        ),
        ("Complete a submission that was cut off:", "hpml submit --resume last"),
    ],
    "run": [
        ("Submit a job and follow it:", "hpml run job.yaml"),
        ("On this machine, with the summary for programs:", "hpml run job.yaml --local --json"),
    ],
    "list": [("The newest five runs:", "hpml list -n 5")],
    "status": [
        ("All that is not over:", "hpml status"),
        ("One run, for programs:", "hpml status last --json"),
    ],
    "logs": [
        ("Follow the newest run's output:", "hpml logs -f"),
        ("The last 50 lines of a run:", "hpml logs digits-20260102-030405-abcdef -n 50"),
    ],
    "cancel": [
        ("Cancel the newest run:", "hpml cancel last"),
        ("Cancel two runs by their jobs' ids:", "hpml cancel 4711 4712"),
    ],
    "prune": [
        ("What would go, and what that frees:", "hpml prune --older-than 30d"),
        ("Remove it, but keep the newest 20:", "hpml prune --older-than 30d --keep 20 --yes"),
        ("What failed or was cancelled:", "hpml prune --state FAILED,CANCELLED --yes"),
    ],
    "wait": [("In a script, go on when the run is over:", "hpml wait last")],
    "show": [
        ("All that is known of the newest run:", "hpml show"),
        ("Where each of many ranks ran:", "hpml show last --ranks"),
    ],
    "doctor": [("Look at this machine:", "hpml doctor")],
    "schema": [
        ("For an editor's checks:", "hpml schema job"),
        ("The same for site profiles:", "hpml schema site"),
    ],
    "import": [
        ("Convert a script and print the job file:", "hpml import train.sh"),
        ("Write it, replacing an existing file:", "hpml import train.sh -o train.yaml --force"),
    ],
    "check": [
        ("Would the cluster take this job:", "hpml check job.yaml"),
        ("The same with four nodes:", "hpml check job.yaml --set resources.nodes=4"),
    ],
    "init": [
        ("Write hpml.toml for the projects below this directory:", "hpml init"),
        ("Yours for all projects, with a look at the nodes:", "hpml init --user --probe"),
    ],
    "template": [("Which templates count here:", "hpml template list")],
    "template list": [("For programs:", "hpml template list --json")],
    "template eject": [
        ("Begin a template of your own:", "hpml template eject torchrun"),
        ("A copy of all that hpml has:", "hpml template eject base --whole"),
    ],
    "topo": [
        ("This node:", "hpml topo"),
        ("Another one, from what it printed, with a picture:", "hpml topo topo.txt --svg node.svg"),
        ("Of a file, for programs:", "hpml topo machine.xml --json"),
        (
            "Where four ranks would run there, with a picture:",
            "hpml topo machine.xml --ranks 4 --svg ranks.svg",
        ),
        ("Where a job's ranks would run:", "hpml topo --plan job.yaml"),
        ("Where a run's ranks ran:", "hpml topo --run last --svg ranks.svg"),
    ],
    "pack": [
        ("Pack a data set, in archives of 2 GiB:", "hpml pack imagenet packed --shard-size 2G"),
        ("Complete a pack that was killed:", "hpml pack imagenet packed --resume"),
        ("Check every digest:", "hpml pack --verify packed"),
        ("List its files, for programs:", "hpml pack --list packed --json"),
    ],
    "stage": [
        ("Into RAM, for as long as this shell or script runs:", "hpml stage imagenet --to shm"),
        ("In a script, `data=$(…)`, to wherever it fits:", "hpml stage imagenet --print path"),
        ("Onto the node's disk, kept for later jobs:", "hpml stage imagenet --to local --keep"),
        ("An archive and a directory that is called like a command:", "hpml stage val.tar ./ls"),
    ],
    "stage ls": [("What you have on this node:", "hpml stage ls")],
    "stage verify": [
        ("Compare with the digests:", "hpml stage verify /dev/shm/hpml-1000/shell-4711-99/data")
    ],
    "stage clean": [
        ("Remove what dead jobs left:", "hpml stage clean"),
        ("At the end of a script:", "hpml stage clean --mine"),
        ("What nobody used for a week:", "hpml stage clean --older 7d --dry-run"),
    ],
    "stage bench": [
        ("From the shared file system to this node:", "hpml stage bench --from /scratch/ada"),
        ("Quickly, to RAM alone:", "hpml stage bench /dev/shm --files 1000 --large 64M"),
    ],
    "export": [("Show this node's GPUs and jobs to Prometheus:", "hpml export node")],
    "export node": [
        ("On this machine's own address alone:", "hpml export node"),
        (
            "For a Prometheus elsewhere, with TLS and passwords:",
            "hpml export node --listen :9445 --web-config web.yml",
        ),
        (
            "GPUs every five seconds, Lustre not at all:",
            "hpml export node --gpu-interval 5 --no-lustre",
        ),
    ],
    "export metrics": [("The whole catalogue, for programs:", "hpml export metrics --json")],
    "man": [
        ("Read about a command:", "hpml man submit"),
        ("Install all pages:", "hpml man --output /usr/local/share/man"),
    ],
}
"""Command without `hpml` -> what an example is for, and its command line. The first one shows the
least that must be given."""
