"""Ask the module system, where there is one, for the modules of a job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hpml_orchestrator.check.finding import Finding
from hpml_orchestrator.errors import SchedulerUnavailable, did_you_mean
from hpml_orchestrator.scheduler.command import Runner

__all__ = ["check_modules"]

# Each one is loaded after it is found: in a hierarchy the next may show only then. Older systems
# have no `is-avail`; `avail` prints to standard error there.
_SCRIPT = """\
if ! type module >/dev/null 2>&1; then
  for file in /etc/profile.d/z00_lmod.sh /etc/profile.d/lmod.sh /etc/profile.d/modules.sh \
      /usr/share/modules/init/bash; do
    if [ -r "$file" ]; then . "$file"; break; fi
  done
fi
type module >/dev/null 2>&1 || exit 77
missing=0
has() {
  module is-avail "$1" >/dev/null 2>&1 || module -t avail "$1" 2>&1 | grep -qF "$1"
}
for name; do
  if has "$name"; then
    module load "$name" >/dev/null 2>&1
  else
    printf 'missing %s\\n' "$name"; missing=1
  fi
done
if [ "$missing" = 1 ]; then module -t avail 2>&1 | sed 's/^/there /'; fi
exit 0
"""


def check_modules(
    modules: Sequence[str], run: Runner, environment: Mapping[str, str], *, timeout: float
) -> list[Finding]:
    """Return a warning for each module that this machine does not have.

    Nothing is said where there is no module system, or it gives no answer in time.

    Args:
        modules: names, in the order in which the job loads them.
        run: starts bash.
        environment: of the submitting process, which may hold the function `module`.
        timeout: seconds.
    """
    if not modules:
        return []
    try:
        done = run.run(["bash", "-c", _SCRIPT, "bash", *modules], env=environment, timeout=timeout)
    except SchedulerUnavailable:
        return []
    lines = done.stdout.splitlines()
    there = [line.removeprefix("there ").strip() for line in lines if line.startswith("there ")]
    missing = {line.removeprefix("missing ") for line in lines if line.startswith("missing ")}
    return [
        Finding(
            "warning",
            "module.unknown",
            f"environment.modules.{index}",
            name,
            f"there is no module {name} on this machine",
            hint=did_you_mean(name, [word for word in there if not word.endswith(":")])
            or "`module avail` lists those that there are",
        )
        for index, name in enumerate(modules)
        if name in missing
    ]
