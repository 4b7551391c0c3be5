"""Options of the Slurm exporter, as JSON for its process, and the source that they choose."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING

from hpml_exporters.core.sampler import CollectorSource
from hpml_exporters.options import NodeOptions
from hpml_exporters.slurm.collector import INTERVAL_MIN, SlurmCollector
from hpml_orchestrator.errors import InputError, SchedulerUnavailable

if TYPE_CHECKING:
    from hpml_exporters.slurm.view import ViewSource

SOURCES = ("auto", "pyslurm", "commands")
_STUCK_SECONDS = 600.0  # several commands of up to a minute each


@dataclass(frozen=True)
class SlurmOptions:
    """How a cluster is exported.

    Attributes:
        listen, web_config, address_file: as of a node's exporter.
        source: one of SOURCES; auto is pyslurm if it can be imported, else commands.
        interval: seconds between two refreshes, 30 at least.
        users: show jobs and fairshare by user.
    """

    listen: str = "127.0.0.1:9446"
    web_config: str = ""
    address_file: str = ""
    source: str = "auto"
    interval: float = INTERVAL_MIN
    users: bool = False

    def __post_init__(self) -> None:
        """Refuse wrong values."""
        if self.source not in SOURCES:
            hint = f"one of {', '.join(SOURCES)}"
            if self.source == "openmetrics":
                hint += "; Prometheus scrapes Slurm's own metrics, see docs/slurm-exporter.md"
            raise InputError("no such source", field="source", value=self.source, hint=hint)
        if not INTERVAL_MIN <= self.interval <= 3600:  # noqa: PLR2004 - an hour
            raise InputError("must be 30 to 3600 seconds", field="interval", value=self.interval)

    def to_json(self) -> str:
        """Return the options as a JSON object."""
        return json.dumps(asdict(self))

    def server(self) -> NodeOptions:
        """Return the options of the web server and the watchdog."""
        return NodeOptions(
            listen=self.listen,
            web_config=self.web_config,
            address_file=self.address_file,
            stuck_seconds=_STUCK_SECONDS,
            exit_seconds=2 * _STUCK_SECONDS,
        )

    def sources(self) -> list[CollectorSource]:
        """Return the collector for the sampler.

        Raises:
            InputError: pyslurm was asked for and is not installed.
        """
        if self.source == "pyslurm" and find_spec("pyslurm") is None:
            hint = "build it for this Slurm, see docs/slurm-exporter.md; or use --source commands"
            raise InputError("pyslurm is not installed", field="source", value="pyslurm", hint=hint)
        return [CollectorSource("slurm", self.collector)]

    def collector(self) -> SlurmCollector:
        """Make the collector.

        Raises:
            ImportError: pyslurm was asked for and cannot be imported.
            SchedulerUnavailable: it needs a slurm.conf that is not there.
        """
        return SlurmCollector(self._source(), interval=self.interval, users=self.users)

    def _source(self) -> ViewSource:
        # Only the chosen source is imported: the exporter stays small.
        from hpml_exporters.slurm.commands import Commands  # noqa: PLC0415 - one source is used

        if self.source != "commands":
            from hpml_exporters.slurm.native import Native  # noqa: PLC0415 - pyslurm may be missing

            try:
                return Native(shares=self.users)
            except (ImportError, SchedulerUnavailable):
                if self.source == "pyslurm":
                    raise
        return Commands(shares=self.users)
