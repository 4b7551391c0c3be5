"""Metrics of GPUs and of the jobs' use of them; one series per GPU unless the help differs.

`uuid` is the GPU's UUID or, for an instance of a GPU that is split (MIG), the instance's.
"""

from __future__ import annotations

from hpml_exporters.core.metric import MetricSpec, MetricType

_GPM = "nvmlGpmMetricsGet, metric {} (Hopper and later)"
_FIELD = "nvmlDeviceGetFieldValues, field {}"
_PROCESS_LISTS = "nvmlDeviceGet{Compute,Graphics,MPSCompute}RunningProcesses"

_UNITS = {"seconds", "ratio", "bytes", "watts", "joules", "celsius", "hertz"}


def _gauge(name: str, help_: str, source: str, *labels: str) -> MetricSpec:
    return MetricSpec(f"hpml_gpu_{name}", "gauge", help_, ("uuid", *labels), _unit_of(name), source)


def _counter(name: str, help_: str, source: str, *labels: str) -> MetricSpec:
    full = f"hpml_gpu_{name}_total"
    return MetricSpec(full, "counter", help_, ("uuid", *labels), _unit_of(name), source)


def _of_job(name: str, help_: str, source: str, *labels: str) -> MetricSpec:
    kind: MetricType = "info" if name.endswith("_info") else "gauge"
    return MetricSpec(
        f"hpml_job_{name}", kind, help_, ("cluster", "jobid", *labels), _unit_of(name), source
    )


def _unit_of(name: str) -> str:
    word = name.rpartition("_")[2]
    return word if word in _UNITS else ""


INFO = MetricSpec(
    "hpml_gpu_info",
    "info",
    "A GPU or MIG instance; mig is empty, enabled for a GPU that is split, or the profile of the"
    " instance, parent the UUID of its GPU, gpu_instance the number of its GPU instance.",
    ("uuid", "index", "name", "pci_bus_id", "minor", "serial", "mig", "parent", "gpu_instance"),
    source="nvitop: nvmlDeviceGetUUID, GetName, GetPciInfo, GetMinorNumber, GetSerial, GetMigMode",
)
DRIVER = MetricSpec(
    "hpml_gpu_driver_info",
    "info",
    "Version of the NVIDIA driver.",
    ("version",),
    source="nvmlSystemGetDriverVersion",
)
UP = _gauge(
    "up",
    "Whether the GPU answers; 0 when it is lost. One that was lost before its UUID was known has"
    " its PCI address as uuid.",
    "errors of NVML's calls; /sys/bus/pci/devices",
)
GPUS = MetricSpec(
    "hpml_gpus",
    "gauge",
    "GPUs of the node by state: up, or lost, also those that were lost before they had a name.",
    ("state",),
    source="nvmlDeviceGetCount and errors of NVML's calls",
)
BUSY = _counter(
    "busy_seconds",
    "Time in which some kernel was resident, integrated over all readings since the exporter"
    " started; up to two minutes without a reading count as the reading after them.",
    "nvmlDeviceGetUtilizationRates; of MIG instances nvmlGpmMetricsGet, metric 1",
)
UTILIZATION = _gauge(
    "utilization_ratio",
    "Share of the last second or less in which some kernel was resident; a spinning kernel counts"
    " as 1. Of a split GPU: the mean of its instances by their slices.",
    "nvmlDeviceGetUtilizationRates; of MIG instances nvmlGpmMetricsGet, metric 1",
)
MEMORY_UTILIZATION = _gauge(
    "memory_utilization_ratio",
    "Share of the last second or less in which GPU memory was read or written.",
    "nvmlDeviceGetUtilizationRates",
)
MEMORY_USED = _gauge(
    "memory_used_bytes",
    "GPU memory in use, without what the driver reserves if it reports that.",
    "nvmlDeviceGetMemoryInfo_v2, or nvmlDeviceGetMemoryInfo",
)
MEMORY_TOTAL = _gauge(
    "memory_total_bytes",
    "GPU memory there is.",
    "nvmlDeviceGetMemoryInfo_v2, or nvmlDeviceGetMemoryInfo",
)
SM_ACTIVE = _gauge(
    "sm_active_ratio",
    "Share of the multiprocessors that were busy, mean since the reading before.",
    _GPM.format(2),
)
SM_OCCUPANCY = _gauge(
    "sm_occupancy_ratio",
    "Resident warps against the most that fit, mean since the reading before.",
    _GPM.format(3),
)
TENSOR_ACTIVE = _gauge(
    "tensor_active_ratio",
    "Share of time in which tensor cores worked, mean since the reading before.",
    _GPM.format(5),
)
DRAM_ACTIVE = _gauge(
    "dram_active_ratio",
    "Bandwidth of GPU memory in use against its peak, mean since the reading before.",
    _GPM.format(10),
)
POWER = _gauge("power_watts", "Power drawn.", _FIELD.format(186) + ", or nvmlDeviceGetPowerUsage")
POWER_LIMIT = _gauge(
    "power_limit_watts", "Power limit in force.", "nvmlDeviceGetEnforcedPowerLimit"
)
ENERGY = _counter(
    "energy_joules",
    "Energy used since the driver was loaded, or since the exporter started where the GPU does not"
    " count.",
    _FIELD.format(83) + ", nvmlDeviceGetTotalEnergyConsumption, or power integrated",
)
TEMPERATURE = _gauge(
    "temperature_celsius",
    "Temperature of the GPU's core.",
    "nvmlDeviceGetTemperatureV, or nvmlDeviceGetTemperature",
)
MEMORY_TEMPERATURE = _gauge(
    "memory_temperature_celsius", "Temperature of GPU memory.", _FIELD.format(82)
)
TEMPERATURE_LIMIT = _gauge(
    "temperature_limit_celsius",
    "Temperature of core or memory from which the GPU lowers its clocks.",
    "nvmlDeviceGetTemperatureThreshold, slowdown and memory maximum",
    "sensor",
)
CLOCK = _gauge(
    "clock_hertz",
    "Clock rate now, of the multiprocessors (sm) and of memory.",
    "nvmlDeviceGetClockInfo",
    "type",
)
THROTTLED = _counter(
    "throttled_seconds",
    "Time in which clocks were held down, by the strongest reason: hw_thermal, power_brake,"
    " hw_slowdown (for another reason), sw_thermal, power (the power cap), sync_boost, board_limit,"
    " reliability. Reasons never overlap.",
    "bits of nvmlDeviceGetCurrentClocksEventReasons, integrated",
    "reason",
)
ENCODER = _gauge(
    "encoder_utilization_ratio", "Use of the video encoder.", "nvmlDeviceGetEncoderUtilization"
)
DECODER = _gauge(
    "decoder_utilization_ratio", "Use of the video decoder.", "nvmlDeviceGetDecoderUtilization"
)
ECC_ERRORS = _counter(
    "ecc_errors",
    "Memory errors since the driver was loaded, corrected or uncorrected.",
    "nvmlDeviceGetFieldValues, fields 3 and 4",
    "error",
)
RETIRED_PENDING = _gauge(
    "retired_pages_pending",
    "Whether a page waits for the next start of the driver to be taken out of use.",
    _FIELD.format(31),
)
REMAPPED_ROWS = _gauge(
    "remapped_rows",
    "Rows of GPU memory that were replaced by spare ones, by the kind of error.",
    "nvmlDeviceGetFieldValues, fields 142 and 143",
    "error",
)
REMAPPED_PENDING = _gauge(
    "remapped_rows_pending",
    "Whether a row waits for the next reset of the GPU to be replaced.",
    _FIELD.format(144),
)
REMAPPED_FAILED = _gauge(
    "remapped_rows_failed",
    "Whether a row could not be replaced; the GPU has to be exchanged then.",
    _FIELD.format(145),
)
XID_ERRORS = _counter(
    "xid_errors",
    "Errors that the driver reported (XID) since the exporter started.",
    "nvmlEventSetWait_v2",
    "xid",
)
XID_LAST = _gauge(
    "xid_last_timestamp_seconds",
    "Unix time at which this XID was last reported.",
    "nvmlEventSetWait_v2",
    "xid",
)
PCIE = _counter(
    "pcie_bytes",
    "Bytes over PCIe since the exporter started; without GPM what is above 4 GiB between two"
    " readings is missed.",
    "nvmlGpmMetricsGet, metrics 20 and 21, integrated; else nvmlDeviceGetFieldValues, fields 197"
    " and 198",
    "direction",
)
PCIE_REPLAYS = _counter(
    "pcie_replays", "PCIe packets that had to be sent again.", _FIELD.format(94)
)
PCIE_WIDTH = _gauge("pcie_link_width", "PCIe lanes in use.", "nvmlDeviceGetCurrPcieLinkWidth")
PCIE_WIDTH_MAX = _gauge(
    "pcie_link_width_max", "PCIe lanes that GPU and slot can use.", "nvmlDeviceGetMaxPcieLinkWidth"
)
NVLINK = _counter(
    "nvlink_bytes",
    "Payload over all NVLinks, as seen from the GPU.",
    "nvmlDeviceGetFieldValues, fields 138 and 139; else nvmlGpmMetricsGet, metrics 60 and 61,"
    " integrated",
    "direction",
)
NVLINK_LINKS = _gauge("nvlink_links", "NVLinks that the GPU has.", _FIELD.format(91))
NVLINK_ACTIVE = _gauge(
    "nvlink_links_active",
    "NVLinks that are active or asleep, neither down nor with their traffic disabled.",
    _FIELD.format("165, of each link"),
)
NVLINK_ERRORS = _counter(
    "nvlink_errors",
    "Errors of all NVLinks: crc (of flow control), replay, recovery; on Blackwell recovery, "
    "recovery_failed, malformed, overrun, receive, receive_remote, receive_general, integrity, "
    "discarded, effective (after forward error correction), symbol (before it).",
    "nvmlDeviceGetFieldValues, fields 38, 52 and 59; of each link 161 to 163, 206 to 215, 219, 221",
    "type",
)
PROCESSES = _gauge(
    "processes",
    "Processes that have the GPU open, of jobs and of no job (owner=none).",
    _PROCESS_LISTS,
    "owner",
)
JOB_GPU_INFO = _of_job(
    "gpu_info",
    "A GPU that the job was allocated (allocated=1) or has a process on; allocated is empty where"
    " the allocation is unknown. At most one series per GPU has owner=1, of several jobs that with"
    " the allocation and the lowest number: join with that.",
    "the prolog's map or Slurm's environment, and the processes of NVML",
    *("uuid", "allocated", "owner"),
)
JOB_GPUS_ALLOCATED = _of_job(
    "gpus_allocated",
    "GPUs of this node that the job was allocated; absent if that is unknown.",
    "the prolog's map or Slurm's environment; by UUID, PCI address and minor number",
)
JOB_GPUS_USED = _of_job(
    "gpus_used",
    "Allocated GPUs on which the job has a process; every GPU that it uses if the allocation is "
    "unknown. Absent while the processes of one of them cannot be read.",
    _PROCESS_LISTS,
)
JOB_GPUS_FOREIGN = _of_job(
    "gpus_foreign",
    "GPUs on which the job has a process although they were not allocated to it.",
    _PROCESS_LISTS,
)
JOB_GPU_PROCESSES = _of_job(
    "gpu_processes",
    "Processes of the job that have the GPU open; 0 for an allocated GPU that it does not use.",
    _PROCESS_LISTS,
    "uuid",
)
JOB_GPU_MEMORY_USED = _of_job(
    "gpu_memory_used_bytes", "GPU memory that the job's processes hold.", _PROCESS_LISTS, "uuid"
)

SPECS: tuple[MetricSpec, ...] = tuple(
    one for one in tuple(globals().values()) if isinstance(one, MetricSpec)
)
"""All of them, in the order in which they are shown."""
