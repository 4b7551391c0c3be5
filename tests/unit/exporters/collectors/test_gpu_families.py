"""The catalogue and what the GPU collector makes fit together."""

from __future__ import annotations

import subprocess
import sys

from hpml_exporters.gpu.calls import FIELDS, REASONS
from hpml_exporters.gpu.collector import make
from hpml_exporters.gpu.families import SERIES
from hpml_exporters.gpu.metrics import SPECS
from hpml_exporters.options import Context, NodeOptions


def test_every_series_has_its_labels() -> None:
    """A key of a reading and its labels, by metric: one per label after the UUID."""
    for spec, series in SERIES.items():
        assert spec in SPECS
        assert {len(labels) for _, labels in series} == {len(spec.labels) - 1}, spec.name


def test_every_field_that_is_read_is_shown() -> None:
    """Nothing is asked of the driver for nobody."""
    shown = {key for series in SERIES.values() for key, _ in series}
    assert {field.key for field in FIELDS} | set(REASONS) <= shown
    keys = [key for series in SERIES.values() for key, _ in series]
    assert len(keys) == len(set(keys))


def test_names_are_unique() -> None:
    """No two metrics of one name."""
    assert len({spec.name for spec in SPECS}) == len(SPECS) > 30


def test_a_collector_takes_its_rhythm_from_the_options() -> None:
    """And its name is that of the switch."""
    collector = make(Context(NodeOptions(gpu_interval=2.5)))
    assert (collector.name, collector.interval) == ("gpu", 2.5)
    assert collector.specs == SPECS


def test_importing_it_loads_nothing_heavy() -> None:
    """Nodes without a GPU import it too."""
    code = (
        "import sys, hpml_exporters.gpu.collector\n"
        "print([one for one in ('nvitop', 'pynvml', 'psutil', 'logging', 'asyncio')"
        " if one in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
