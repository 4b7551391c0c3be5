"""Words that people bring from sbatch, torchrun and other tools, and the fields they mean here."""

from __future__ import annotations

__all__ = ["WORDS", "field_for"]

_MEANT = {
    "name": "job_name jobname",
    "script": "python_script entrypoint entry_point",
    "command": "cmd executable program",
    "args": "arguments argv script_args",
    "workdir": "chdir cwd working_dir working_directory",
    "array": "job_array array_tasks",
    "after": "dependency dependencies depends_on depend afterok",
    "stage": "data dataset datasets staging",
    "binding": "cpu_bind gpu_bind bind bind_to map_by numa_binding affinity cpu_affinity",
    "binding.loader_workers": "num_workers dataloader_workers workers",
    "binding.hardware_threads": "threads_per_core hyperthreading hyperthreads smt",
    "resources.nodes": "nnodes num_nodes node_count",
    "resources.gpus": "gpus_per_node gpus_per_task gres gpu num_gpus ngpus gpu_type",
    "resources.ranks_per_node": "ntasks_per_node ntasks tasks_per_node nproc_per_node "
    "processes_per_node ranks",
    "resources.ranks_per_gpu": "ntasks_per_gpu tasks_per_gpu processes_per_gpu",
    "resources.cpus_per_rank": "cpus_per_task cpus cpus_per_gpu num_cpus cores threads",
    "resources.memory": "mem ram mem_per_node mem_gb mem_per_cpu mem_per_gpu",
    "resources.time": "walltime wall_time time_limit timelimit timeout time_min timeout_min",
    "resources.partition": "queue partitions",
    "resources.account": "project",
    "resources.constraint": "features feature",
    "resources.mail": "email mail_user mail_type",
    "resources.extra": "sbatch slurm reservation nodelist exclude nodefile licenses "
    "additional_parameters",
    "environment.modules": "modules module_load",
    "environment.conda": "conda_env",
    "environment.setup": "setup prologue pre_command init_commands",
    "environment.venv": "virtualenv virtual_env",
    "environment.python": "interpreter python_path",
    "environment.variables": "variables env envs env_vars vars setenv",
    "environment.inherit": "export",
    "environment.container": "apptainer singularity docker pyxis enroot",
    "environment.container.image": "image container_image sif",
    "environment.container.mounts": "container_mounts mounts",
}

WORDS = {word: field for field, words in _MEANT.items() for word in words.split()}
"""Word -> field."""


def field_for(word: str, parents: list[str]) -> str:
    """Return the field that a well-known word means at a place; empty where it means none.

    Args:
        word: the unknown field's own name.
        parents: the fields around it; an inner model such as `stage` has words of its own, of
            which nothing is known here.

    >>> field_for("gpus-per-node", []), field_for("mem", ["resources"]), field_for("mem", ["stage"])
    ('resources.gpus', 'resources.memory', '')
    """
    if parents not in (
        [],
        ["resources"],
        ["environment"],
        ["environment", "container"],
        ["binding"],
    ):
        return ""
    return WORDS.get(word.lower().replace("-", "_"), "")
