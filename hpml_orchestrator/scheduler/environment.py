"""Which variables of the user's environment a job inherits, for every backend."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

# A submission from inside a job, such as `srun --pty bash`, carries the outer job's variables.
# Leaked SLURM_, SBATCH_ or SRUN_ values change the size and binding of nested steps.
_DROPPED_PREFIXES = tuple(
    "SLURM_ SLURMD_ SBATCH_ SRUN_ SALLOC_ SQUEUE_ SACCT_ SINFO_ SCANCEL_ PMI_ PMI2_ PMIX_ OMPI_ "
    "PRTE_ HPML_ PET_ TORCHELASTIC_ HOROVOD_ SSH_ XDG_SESSION_ TMUX".split()
)
_DROPPED = frozenset(
    # a launcher sets these; values of the submitting host mean nothing on the node
    "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK NODE_RANK MASTER_ADDR MASTER_PORT "
    "TMPDIR TMP TEMP HOSTNAME HOST PWD OLDPWD SHLVL _ BASH_ENV ENV CUDA_VISIBLE_DEVICES "
    "ROCR_VISIBLE_DEVICES DISPLAY XAUTHORITY XDG_RUNTIME_DIR DBUS_SESSION_BUS_ADDRESS "
    "WINDOWID TERM_SESSION_ID STY".split()
)
# Open MPI refuses to start as root, the usual user in a container, unless these are set.
_KEPT = frozenset({"SLURM_CONF", "OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"})
_MINIMAL = frozenset(
    "HOME USER LOGNAME SHELL PATH LANG LANGUAGE TZ TERM MAIL MODULEPATH MODULESHOME LMOD_CMD "
    "LMOD_DIR LMOD_PKG BASH_FUNC_module%% BASH_FUNC_ml%% SLURM_CONF".split()
)


def job_environment(environment: Mapping[str, str], inherit: str) -> dict[str, str]:
    """Return the variables that a job starts with.

    Args:
        environment: the environment of the submitting process.
        inherit: `all` for everything except variables of the submitting session, of schedulers and
            of launchers; `minimal` for those that every login has.

    >>> job_environment({"PATH": "/bin", "SLURM_JOB_ID": "1", "TOKEN": "x"}, "minimal")
    {'PATH': '/bin'}
    """
    if inherit == "minimal":
        return {
            name: value
            for name, value in environment.items()
            if name in _MINIMAL or name.startswith("LC_")
        }
    return {
        name: value
        for name, value in environment.items()
        if name in _KEPT or not (name in _DROPPED or name.startswith(_DROPPED_PREFIXES))
    }
