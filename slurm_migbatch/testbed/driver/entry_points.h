/* A list to be included with FN defined, hence without a guard.
 *
 * Every entry point that is served under the machine's lock:
 *   FN(exported name, implementation, READ or WRITE, (parameters), arguments...)
 * Older names of a call stand beside the newer one and share its code where they share its structs.
 */

/* system.c */
FN(nvmlSystemGetDriverVersion, system_driver_version, READ, (char *text, unsigned length), text, length)
FN(nvmlSystemGetNVMLVersion, system_nvml_version, READ, (char *text, unsigned length), text, length)
FN(nvmlSystemGetCudaDriverVersion, system_cuda_version, READ, (int *version), version)
FN(nvmlSystemGetCudaDriverVersion_v2, system_cuda_version, READ, (int *version), version)
FN(nvmlSystemGetProcessName, system_process_name, READ, (unsigned pid, char *name, unsigned length), pid, name, length)
FN(nvmlDeviceGetCount, device_count, READ, (unsigned *count), count)
FN(nvmlDeviceGetCount_v2, device_count, READ, (unsigned *count), count)
FN(nvmlUnitGetCount, unit_count, READ, (unsigned *count), count)

/* device.c */
FN(nvmlDeviceGetHandleByIndex, device_by_index, READ, (unsigned index, nvmlDevice_t *out), index, out)
FN(nvmlDeviceGetHandleByIndex_v2, device_by_index, READ, (unsigned index, nvmlDevice_t *out), index, out)
FN(nvmlDeviceGetHandleByUUID, device_by_uuid, READ, (const char *uuid, nvmlDevice_t *out), uuid, out)
FN(nvmlDeviceGetHandleByPciBusId, device_by_pci, READ, (const char *bus_id, nvmlDevice_t *out), bus_id, out)
FN(nvmlDeviceGetHandleByPciBusId_v2, device_by_pci, READ, (const char *bus_id, nvmlDevice_t *out), bus_id, out)
FN(nvmlDeviceGetHandleBySerial, device_by_serial, READ, (const char *serial, nvmlDevice_t *out), serial, out)
FN(nvmlDeviceGetName, device_name, READ, (nvmlDevice_t device, char *name, unsigned length), device, name, length)
FN(nvmlDeviceGetUUID, device_uuid, READ, (nvmlDevice_t device, char *uuid, unsigned length), device, uuid, length)
FN(nvmlDeviceGetSerial, device_serial, READ, (nvmlDevice_t device, char *text, unsigned length), device, text, length)
FN(nvmlDeviceGetIndex, device_index, READ, (nvmlDevice_t device, unsigned *index), device, index)
FN(nvmlDeviceGetMinorNumber, device_minor, READ, (nvmlDevice_t device, unsigned *minor), device, minor)
FN(nvmlDeviceGetBrand, device_brand, READ, (nvmlDevice_t device, unsigned *brand), device, brand)
FN(nvmlDeviceGetPciInfo, device_pci_v2, READ, (nvmlDevice_t device, nvmlPciInfo_v2_t *pci), device, pci)
FN(nvmlDeviceGetPciInfo_v2, device_pci_v2, READ, (nvmlDevice_t device, nvmlPciInfo_v2_t *pci), device, pci)
FN(nvmlDeviceGetPciInfo_v3, device_pci, READ, (nvmlDevice_t device, nvmlPciInfo_t *pci), device, pci)
FN(nvmlDeviceGetArchitecture, device_architecture, READ, (nvmlDevice_t device, unsigned *arch), device, arch)
FN(nvmlDeviceGetCudaComputeCapability, device_capability, READ, (nvmlDevice_t device, int *major, int *minor), device,
   major, minor)
FN(nvmlDeviceGetNumGpuCores, device_cores, READ, (nvmlDevice_t device, unsigned *cores), device, cores)
FN(nvmlDeviceGetMemoryBusWidth, device_bus_width, READ, (nvmlDevice_t device, unsigned *bits), device, bits)
FN(nvmlDeviceGetCpuAffinity, device_cpu_affinity, READ, (nvmlDevice_t device, unsigned size, unsigned long *set), device,
   size, set)
FN(nvmlDeviceGetPersistenceMode, device_persistence, READ, (nvmlDevice_t device, unsigned *mode), device, mode)
FN(nvmlDeviceGetComputeMode, device_compute_mode, READ, (nvmlDevice_t device, unsigned *mode), device, mode)
FN(nvmlDeviceGetVirtualizationMode, device_virtualization, READ, (nvmlDevice_t device, unsigned *mode), device, mode)
FN(nvmlDeviceGetDisplayActive, device_display, READ, (nvmlDevice_t device, unsigned *active), device, active)
FN(nvmlDeviceGetDisplayMode, device_display, READ, (nvmlDevice_t device, unsigned *active), device, active)
FN(nvmlDeviceGetEccMode, device_ecc, READ, (nvmlDevice_t device, unsigned *current, unsigned *pending), device, current,
   pending)

/* board.c */
FN(nvmlDeviceGetDriverModel, driver_model, READ, (nvmlDevice_t device, unsigned *current, unsigned *pending), device,
   current, pending)
FN(nvmlDeviceGetDriverModel_v2, driver_model, READ, (nvmlDevice_t device, unsigned *current, unsigned *pending), device,
   current, pending)
FN(nvmlDeviceGetGpuOperationMode, operation_mode, READ, (nvmlDevice_t device, unsigned *current, unsigned *pending),
   device, current, pending)
FN(nvmlDeviceGetAutoBoostedClocksEnabled, auto_boost, READ,
   (nvmlDevice_t device, unsigned *enabled, unsigned *by_default), device, enabled, by_default)
FN(nvmlDeviceGetBridgeChipInfo, bridge_chips, READ, (nvmlDevice_t device, void *chips), device, chips)
FN(nvmlDeviceGetGridLicensableFeatures_v4, license_features, READ, (nvmlDevice_t device, void *features), device,
   features)
FN(nvmlDeviceGetVbiosVersion, vbios_version, READ, (nvmlDevice_t device, char *text, unsigned length), device, text,
   length)
FN(nvmlDeviceGetInforomImageVersion, inforom_image, READ, (nvmlDevice_t device, char *text, unsigned length), device,
   text, length)
FN(nvmlDeviceGetInforomVersion, inforom_object, READ,
   (nvmlDevice_t device, unsigned object, char *text, unsigned length), device, object, text, length)
FN(nvmlDeviceGetBoardId, board_id, READ, (nvmlDevice_t device, unsigned *id), device, id)
FN(nvmlDeviceGetMultiGpuBoard, multi_gpu_board, READ, (nvmlDevice_t device, unsigned *several), device, several)
FN(nvmlDeviceGetAccountingMode, accounting_mode, READ, (nvmlDevice_t device, unsigned *mode), device, mode)
FN(nvmlDeviceGetAccountingBufferSize, accounting_buffer, READ, (nvmlDevice_t device, unsigned *size), device, size)
FN(nvmlDeviceGetAccountingPids, accounting_pids, READ, (nvmlDevice_t device, unsigned *count, unsigned *pids), device,
   count, pids)
FN(nvmlDeviceGetTemperatureThreshold, temperature_threshold, READ,
   (nvmlDevice_t device, unsigned type, unsigned *celsius), device, type, celsius)
FN(nvmlDeviceGetSupportedClocksThrottleReasons, event_reasons, READ,
   (nvmlDevice_t device, unsigned long long *reasons), device, reasons)
FN(nvmlDeviceGetSupportedClocksEventReasons, event_reasons, READ, (nvmlDevice_t device, unsigned long long *reasons),
   device, reasons)
FN(nvmlDeviceGetCurrentClocksThrottleReasons, event_reasons, READ, (nvmlDevice_t device, unsigned long long *reasons),
   device, reasons)
FN(nvmlDeviceGetCurrentClocksEventReasons, event_reasons, READ, (nvmlDevice_t device, unsigned long long *reasons),
   device, reasons)
FN(nvmlDeviceGetCurrPcieLinkGeneration, pcie_generation, READ, (nvmlDevice_t device, unsigned *generation), device,
   generation)
FN(nvmlDeviceGetMaxPcieLinkGeneration, pcie_generation, READ, (nvmlDevice_t device, unsigned *generation), device,
   generation)
FN(nvmlDeviceGetCurrPcieLinkWidth, pcie_width, READ, (nvmlDevice_t device, unsigned *width), device, width)
FN(nvmlDeviceGetMaxPcieLinkWidth, pcie_width, READ, (nvmlDevice_t device, unsigned *width), device, width)
FN(nvmlDeviceGetPcieReplayCounter, pcie_replays, READ, (nvmlDevice_t device, unsigned *count), device, count)
FN(nvmlDeviceGetPcieThroughput, pcie_throughput, READ, (nvmlDevice_t device, unsigned counter, unsigned *rate), device,
   counter, rate)

/* links.c */
FN(nvmlDeviceGetNvLinkState, device_nvlink_state, READ, (nvmlDevice_t device, unsigned link, unsigned *active), device,
   link, active)
FN(nvmlDeviceGetNvLinkVersion, device_nvlink_version, READ, (nvmlDevice_t device, unsigned link, unsigned *version),
   device, link, version)
FN(nvmlDeviceGetNvLinkCapability, device_nvlink_capability, READ,
   (nvmlDevice_t device, unsigned link, unsigned capability, unsigned *has), device, link, capability, has)
FN(nvmlDeviceGetNvLinkErrorCounter, device_nvlink_errors, READ,
   (nvmlDevice_t device, unsigned link, unsigned counter, unsigned long long *count), device, link, counter, count)
FN(nvmlDeviceGetNvLinkRemotePciInfo, device_nvlink_remote_v1, READ,
   (nvmlDevice_t device, unsigned link, nvmlPciInfo_v2_t *pci), device, link, pci)
FN(nvmlDeviceGetNvLinkRemotePciInfo_v2, device_nvlink_remote, READ,
   (nvmlDevice_t device, unsigned link, nvmlPciInfo_t *pci), device, link, pci)

FN(nvmlDeviceGetTopologyCommonAncestor, topology_ancestor, READ,
   (nvmlDevice_t one, nvmlDevice_t other, unsigned *level), one, other, level)
FN(nvmlDeviceGetTopologyNearestGpus, topology_nearest, READ,
   (nvmlDevice_t device, unsigned level, unsigned *count, nvmlDevice_t *devices), device, level, count, devices)
FN(nvmlDeviceGetP2PStatus, p2p_status, READ,
   (nvmlDevice_t one, nvmlDevice_t other, unsigned capability, unsigned *status), one, other, capability, status)

/* errors.c */
FN(nvmlDeviceGetTotalEccErrors, ecc_total, READ,
   (nvmlDevice_t device, unsigned type, unsigned counter, unsigned long long *count), device, type, counter, count)
FN(nvmlDeviceGetMemoryErrorCounter, ecc_counter, READ,
   (nvmlDevice_t device, unsigned type, unsigned counter, unsigned location, unsigned long long *count), device, type,
   counter, location, count)
FN(nvmlDeviceGetDetailedEccErrors, ecc_detailed, READ,
   (nvmlDevice_t device, unsigned type, unsigned counter, void *counts), device, type, counter, counts)
FN(nvmlDeviceGetRetiredPages, retired_pages, READ,
   (nvmlDevice_t device, unsigned cause, unsigned *count, unsigned long long *pages), device, cause, count, pages)
FN(nvmlDeviceGetRetiredPagesPendingStatus, retired_pending, READ, (nvmlDevice_t device, unsigned *pending), device,
   pending)
FN(nvmlDeviceGetRemappedRows, remapped_rows, READ,
   (nvmlDevice_t device, unsigned *corrected, unsigned *uncorrected, unsigned *pending, unsigned *failure), device,
   corrected, uncorrected, pending, failure)

/* fields.c */
FN(nvmlDeviceGetFieldValues, field_values, READ, (nvmlDevice_t device, int count, nvmlFieldValue_t *values), device,
   count, values)

/* events.c; waiting is no call like the others and stands there */
FN(nvmlEventSetCreate, event_set_create, READ, (nvmlEventSet_t *out), out)
FN(nvmlEventSetFree, event_set_free, READ, (nvmlEventSet_t set), set)
FN(nvmlDeviceGetSupportedEventTypes, event_types, READ, (nvmlDevice_t device, unsigned long long *types), device, types)
FN(nvmlDeviceRegisterEvents, event_register, READ,
   (nvmlDevice_t device, unsigned long long types, nvmlEventSet_t set), device, types, set)

/* gpm.c */
FN(nvmlGpmQueryDeviceSupport, gpm_support, READ, (nvmlDevice_t device, nvmlGpmSupport_t *support), device, support)
FN(nvmlGpmSampleAlloc, gpm_alloc, READ, (nvmlGpmSample_t *out), out)
FN(nvmlGpmSampleFree, gpm_free, READ, (nvmlGpmSample_t sample), sample)
FN(nvmlGpmSampleGet, gpm_sample, READ, (nvmlDevice_t device, nvmlGpmSample_t sample), device, sample)
FN(nvmlGpmMigSampleGet, gpm_sample_mig, READ, (nvmlDevice_t device, unsigned gi_id, nvmlGpmSample_t sample), device,
   gi_id, sample)
FN(nvmlGpmMetricsGet, gpm_metrics, READ, (nvmlGpmMetricsGet_t *get), get)

/* memory.c */
FN(nvmlDeviceGetMemoryInfo, memory_info, READ, (nvmlDevice_t device, nvmlMemory_t *memory), device, memory)
FN(nvmlDeviceGetMemoryInfo_v2, memory_info_v2, READ, (nvmlDevice_t device, nvmlMemory_v2_t *memory), device, memory)
FN(nvmlDeviceGetBAR1MemoryInfo, memory_bar1, READ, (nvmlDevice_t device, nvmlBAR1Memory_t *memory), device, memory)
FN(nvmlDeviceGetComputeRunningProcesses, processes_v1, READ,
   (nvmlDevice_t device, unsigned *count, nvmlProcessInfo_v1_t *infos), device, count, infos)
FN(nvmlDeviceGetComputeRunningProcesses_v2, processes_v2, READ,
   (nvmlDevice_t device, unsigned *count, nvmlProcessInfo_v2_t *infos), device, count, infos)
FN(nvmlDeviceGetComputeRunningProcesses_v3, processes_v2, READ,
   (nvmlDevice_t device, unsigned *count, nvmlProcessInfo_v2_t *infos), device, count, infos)
FN(nvmlDeviceGetGraphicsRunningProcesses, processes_none, READ,
   (nvmlDevice_t device, unsigned *count, void *infos), device, count, infos)
FN(nvmlDeviceGetGraphicsRunningProcesses_v2, processes_none, READ,
   (nvmlDevice_t device, unsigned *count, void *infos), device, count, infos)
FN(nvmlDeviceGetGraphicsRunningProcesses_v3, processes_none, READ,
   (nvmlDevice_t device, unsigned *count, void *infos), device, count, infos)
FN(nvmlDeviceGetMPSComputeRunningProcesses, processes_none, READ,
   (nvmlDevice_t device, unsigned *count, void *infos), device, count, infos)
FN(nvmlDeviceGetMPSComputeRunningProcesses_v2, processes_none, READ,
   (nvmlDevice_t device, unsigned *count, void *infos), device, count, infos)
FN(nvmlDeviceGetMPSComputeRunningProcesses_v3, processes_none, READ,
   (nvmlDevice_t device, unsigned *count, void *infos), device, count, infos)
FN(nvmlDeviceGetRunningProcessDetailList, process_details, READ,
   (nvmlDevice_t device, nvmlProcessDetailList_v1_t *out), device, out)
FN(nvmlDeviceGetConfComputeMemSizeInfo, memory_confidential, READ,
   (nvmlDevice_t device, nvmlConfComputeMemSizeInfo_t *info), device, info)
FN(nvmlDeviceGetProcessUtilization, process_utilization, READ,
   (nvmlDevice_t device, nvmlProcessUtilizationSample_t *samples, unsigned *count, unsigned long long since), device,
   samples, count, since)

/* sensors.c */
FN(nvmlDeviceGetTemperature, sensor_temperature, READ, (nvmlDevice_t device, unsigned sensor, unsigned *celsius), device,
   sensor, celsius)
FN(nvmlDeviceGetTemperatureV, sensor_temperature_v, READ, (nvmlDevice_t device, nvmlTemperature_v1_t *temperature),
   device, temperature)
FN(nvmlDeviceGetPowerUsage, sensor_power, READ, (nvmlDevice_t device, unsigned *milliwatt), device, milliwatt)
FN(nvmlDeviceGetPowerManagementLimit, sensor_power_limit, READ, (nvmlDevice_t device, unsigned *milliwatt), device,
   milliwatt)
FN(nvmlDeviceGetEnforcedPowerLimit, sensor_power_limit, READ, (nvmlDevice_t device, unsigned *milliwatt), device,
   milliwatt)
FN(nvmlDeviceGetPowerManagementDefaultLimit, sensor_power_limit, READ, (nvmlDevice_t device, unsigned *milliwatt),
   device, milliwatt)
FN(nvmlDeviceGetPowerManagementLimitConstraints, sensor_power_range, READ,
   (nvmlDevice_t device, unsigned *lowest, unsigned *highest), device, lowest, highest)
FN(nvmlDeviceGetPowerManagementMode, sensor_power_mode, READ, (nvmlDevice_t device, unsigned *mode), device, mode)
FN(nvmlDeviceGetPowerState, sensor_pstate, READ, (nvmlDevice_t device, unsigned *pstate), device, pstate)
FN(nvmlDeviceGetTotalEnergyConsumption, sensor_energy, READ, (nvmlDevice_t device, unsigned long long *millijoule),
   device, millijoule)
FN(nvmlDeviceGetUtilizationRates, sensor_utilization, READ, (nvmlDevice_t device, nvmlUtilization_t *rates), device,
   rates)
FN(nvmlDeviceGetEncoderUtilization, sensor_engine_utilization, READ,
   (nvmlDevice_t device, unsigned *percent, unsigned *period), device, percent, period)
FN(nvmlDeviceGetDecoderUtilization, sensor_engine_utilization, READ,
   (nvmlDevice_t device, unsigned *percent, unsigned *period), device, percent, period)
FN(nvmlDeviceGetFanSpeed, sensor_fan, READ, (nvmlDevice_t device, unsigned *percent), device, percent)
FN(nvmlDeviceGetPerformanceState, sensor_pstate, READ, (nvmlDevice_t device, unsigned *pstate), device, pstate)
FN(nvmlDeviceGetClockInfo, clock_info, READ, (nvmlDevice_t device, unsigned type, unsigned *mhz), device, type, mhz)
FN(nvmlDeviceGetMaxClockInfo, clock_max, READ, (nvmlDevice_t device, unsigned type, unsigned *mhz), device, type, mhz)
FN(nvmlDeviceGetApplicationsClock, clock_application, READ, (nvmlDevice_t device, unsigned type, unsigned *mhz), device,
   type, mhz)
FN(nvmlDeviceGetDefaultApplicationsClock, clock_max, READ, (nvmlDevice_t device, unsigned type, unsigned *mhz), device,
   type, mhz)
FN(nvmlDeviceGetClock, clock_by_id, READ, (nvmlDevice_t device, unsigned type, unsigned id, unsigned *mhz), device, type,
   id, mhz)
FN(nvmlDeviceGetSupportedMemoryClocks, clock_memory_list, READ,
   (nvmlDevice_t device, unsigned *count, unsigned *mhz), device, count, mhz)
FN(nvmlDeviceGetSupportedGraphicsClocks, clock_graphics_list, READ,
   (nvmlDevice_t device, unsigned memory_mhz, unsigned *count, unsigned *mhz), device, memory_mhz, count, mhz)
FN(nvmlDeviceSetApplicationsClocks, clock_set, WRITE,
   (nvmlDevice_t device, unsigned memory_mhz, unsigned graphics_mhz), device, memory_mhz, graphics_mhz)
FN(nvmlDeviceResetApplicationsClocks, clock_reset, WRITE, (nvmlDevice_t device), device)
FN(nvmlDeviceSetGpuLockedClocks, clock_lock_gpu, WRITE, (nvmlDevice_t device, unsigned lowest, unsigned highest), device,
   lowest, highest)
FN(nvmlDeviceResetGpuLockedClocks, clock_unlock_gpu, WRITE, (nvmlDevice_t device), device)
FN(nvmlDeviceSetMemoryLockedClocks, clock_lock_memory, WRITE, (nvmlDevice_t device, unsigned lowest, unsigned highest),
   device, lowest, highest)
FN(nvmlDeviceResetMemoryLockedClocks, clock_unlock_memory, WRITE, (nvmlDevice_t device), device)

/* mig.c */
FN(nvmlDeviceGetMigMode, mig_mode, READ, (nvmlDevice_t device, unsigned *current, unsigned *pending), device, current,
   pending)
FN(nvmlDeviceSetMigMode, mig_set_mode, WRITE, (nvmlDevice_t device, unsigned mode, nvmlReturn_t *activation), device,
   mode, activation)
FN(nvmlDeviceIsMigDeviceHandle, mig_is_handle, READ, (nvmlDevice_t device, unsigned *is_mig), device, is_mig)
FN(nvmlDeviceGetMaxMigDeviceCount, mig_max_count, READ, (nvmlDevice_t device, unsigned *count), device, count)
FN(nvmlDeviceGetMigDeviceHandleByIndex, mig_by_index, READ, (nvmlDevice_t device, unsigned index, nvmlDevice_t *out),
   device, index, out)
FN(nvmlDeviceGetDeviceHandleFromMigDeviceHandle, mig_parent, READ, (nvmlDevice_t device, nvmlDevice_t *out), device, out)
FN(nvmlDeviceGetGpuInstanceId, mig_gi_id, READ, (nvmlDevice_t device, unsigned *id), device, id)
FN(nvmlDeviceGetComputeInstanceId, mig_ci_id, READ, (nvmlDevice_t device, unsigned *id), device, id)
FN(nvmlDeviceGetAttributes_v2, mig_attributes, READ, (nvmlDevice_t device, nvmlDeviceAttributes_t *out), device, out)

/* gi.c */
FN(nvmlDeviceGetGpuInstanceProfileInfo, gi_profile_info, READ,
   (nvmlDevice_t device, unsigned profile, nvmlGpuInstanceProfileInfo_v1_t *info), device, profile, info)
FN(nvmlDeviceGetGpuInstanceProfileInfoV, gi_profile_info_v, READ, (nvmlDevice_t device, unsigned profile, void *info),
   device, profile, info)
FN(nvmlDeviceGetGpuInstanceProfileInfoByIdV, gi_profile_info_by_id, READ,
   (nvmlDevice_t device, unsigned id, void *info), device, id, info)
FN(nvmlDeviceGetGpuInstancePossiblePlacements, gi_placements_v1, READ,
   (nvmlDevice_t device, unsigned id, nvmlPlacement_t *placements, unsigned *count), device, id, placements, count)
FN(nvmlDeviceGetGpuInstancePossiblePlacements_v2, gi_placements, READ,
   (nvmlDevice_t device, unsigned id, nvmlPlacement_t *placements, unsigned *count), device, id, placements, count)
FN(nvmlDeviceGetGpuInstanceRemainingCapacity, gi_capacity, READ, (nvmlDevice_t device, unsigned id, unsigned *count),
   device, id, count)
FN(nvmlDeviceCreateGpuInstance, gi_create, WRITE, (nvmlDevice_t device, unsigned id, nvmlGpuInstance_t *out), device, id,
   out)
FN(nvmlDeviceCreateGpuInstanceWithPlacement, gi_create_at, WRITE,
   (nvmlDevice_t device, unsigned id, const nvmlPlacement_t *placement, nvmlGpuInstance_t *out), device, id, placement,
   out)
FN(nvmlGpuInstanceDestroy, gi_destroy, WRITE, (nvmlGpuInstance_t instance), instance)
FN(nvmlDeviceGetGpuInstances, gi_list, READ,
   (nvmlDevice_t device, unsigned id, nvmlGpuInstance_t *instances, unsigned *count), device, id, instances, count)
FN(nvmlDeviceGetGpuInstanceById, gi_by_id, READ, (nvmlDevice_t device, unsigned id, nvmlGpuInstance_t *out), device, id,
   out)
FN(nvmlGpuInstanceGetInfo, gi_info, READ, (nvmlGpuInstance_t instance, nvmlGpuInstanceInfo_t *info), instance, info)

/* ci.c */
FN(nvmlGpuInstanceGetComputeInstanceProfileInfo, ci_profile_info, READ,
   (nvmlGpuInstance_t instance, unsigned profile, unsigned engine, nvmlComputeInstanceProfileInfo_v1_t *info), instance,
   profile, engine, info)
FN(nvmlGpuInstanceGetComputeInstanceProfileInfoV, ci_profile_info_v, READ,
   (nvmlGpuInstance_t instance, unsigned profile, unsigned engine, void *info), instance, profile, engine, info)
FN(nvmlGpuInstanceGetComputeInstancePossiblePlacements, ci_placements, READ,
   (nvmlGpuInstance_t instance, unsigned id, nvmlPlacement_t *placements, unsigned *count), instance, id, placements,
   count)
FN(nvmlGpuInstanceGetComputeInstanceRemainingCapacity, ci_capacity, READ,
   (nvmlGpuInstance_t instance, unsigned id, unsigned *count), instance, id, count)
FN(nvmlGpuInstanceCreateComputeInstance, ci_create, WRITE,
   (nvmlGpuInstance_t instance, unsigned id, nvmlComputeInstance_t *out), instance, id, out)
FN(nvmlGpuInstanceCreateComputeInstanceWithPlacement, ci_create_at, WRITE,
   (nvmlGpuInstance_t instance, unsigned id, const nvmlPlacement_t *placement, nvmlComputeInstance_t *out), instance, id,
   placement, out)
FN(nvmlComputeInstanceDestroy, ci_destroy, WRITE, (nvmlComputeInstance_t instance), instance)
FN(nvmlGpuInstanceGetComputeInstances, ci_list, READ,
   (nvmlGpuInstance_t instance, unsigned id, nvmlComputeInstance_t *instances, unsigned *count), instance, id, instances,
   count)
FN(nvmlGpuInstanceGetComputeInstanceById, ci_by_id, READ,
   (nvmlGpuInstance_t instance, unsigned id, nvmlComputeInstance_t *out), instance, id, out)
FN(nvmlComputeInstanceGetInfo, ci_info_v1, READ,
   (nvmlComputeInstance_t instance, nvmlComputeInstanceInfo_v1_t *info), instance, info)
FN(nvmlComputeInstanceGetInfo_v2, ci_info, READ, (nvmlComputeInstance_t instance, nvmlComputeInstanceInfo_t *info),
   instance, info)
