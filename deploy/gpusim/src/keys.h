/* The names that a state file may give to a GPU (see STATE.md): numbers, totals and texts. */
#ifndef GPUSIM_KEYS_H
#define GPUSIM_KEYS_H

/* Numbers and curves of time, in base units: percent, bytes, watts, degrees Celsius, MHz. */
#define NUMBER_KEYS(X) \
    X(minor) X(cc_major) X(cc_minor) X(arch) X(brand) X(cores) X(bus_width) X(board_id) X(module_id) \
    X(util) X(mem_util) X(enc_util) X(dec_util) X(jpg_util) X(ofa_util) \
    X(mem_total) X(mem_reserved) X(mem_used) X(mem_base) X(bar1_total) X(bar1_used) \
    X(temp) X(mem_temp) X(temp_shutdown) X(temp_slowdown) X(temp_mem_max) X(temp_gpu_max) \
    X(power_limit) X(power_default) X(power_min) X(power_max) X(power_enforced) \
    X(clock_graphics) X(clock_sm) X(clock_mem) X(clock_video) \
    X(max_graphics) X(max_sm) X(max_mem) X(max_video) \
    X(ecc_mode) X(ecc_vol_cor) X(ecc_vol_unc) X(ecc_agg_cor) X(ecc_agg_unc) \
    X(pcie_gen) X(pcie_width) X(pcie_max_gen) X(pcie_max_width) X(pcie_replay) X(pcie_bits) \
    X(nvlink_links) X(nvlink_speed) X(nvlink_version) X(nvlink_crc) X(nvlink_replay) \
    X(nvlink_recovery) X(nvlink_counts) \
    X(fan) X(pstate) X(persistence) X(compute_mode) X(display_active) X(display_mode) \
    X(retired_sbe) X(retired_dbe) X(retired_pending) \
    X(remapped_cor) X(remapped_unc) X(remapped_pending) X(remapped_failure) \
    X(gpm) X(lost) X(mig_mode) X(mig_pending) X(mig_max) \
    X(gi) X(ci) X(gi_slices) X(ci_slices) X(sm_count) X(copy_engines)

/* Rates whose integral over time is a counter: each has NAME and NAME_base, the total at the epoch. */
#define TOTAL_KEYS(X) \
    X(power) X(pcie_tx) X(pcie_rx) X(nvlink_tx) X(nvlink_rx) \
    X(throttle_idle) X(throttle_app_clocks) X(throttle_sw_power) X(throttle_hw_slowdown) \
    X(throttle_sync_boost) X(throttle_sw_thermal) X(throttle_hw_thermal) X(throttle_hw_power_brake) \
    X(throttle_display) X(throttle_board_limit) X(throttle_low_util) X(throttle_reliability) \
    X(throttle_base_clocks) \
    X(gpm_graphics) X(gpm_sm) X(gpm_occupancy) X(gpm_integer) X(gpm_tensor) X(gpm_dfma) X(gpm_hmma) \
    X(gpm_imma) X(gpm_dram) X(gpm_fp64) X(gpm_fp32) X(gpm_fp16)

#define TEXT_KEYS(X) \
    X(name) X(uuid) X(serial) X(bus_id) X(pci_id) X(pci_subsystem) X(vbios) X(part_number) X(cpus) X(numa)

#define KEY_ID(name) K_##name,
#define KEY_ID_AND_BASE(name) K_##name, K_##name##_base,
#define TEXT_ID(name) T_##name,

enum key { NUMBER_KEYS(KEY_ID) TOTAL_KEYS(KEY_ID_AND_BASE) KEY_COUNT };
enum text { TEXT_KEYS(TEXT_ID) TEXT_COUNT };

#endif
