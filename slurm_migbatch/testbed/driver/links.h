/* What is asked of NVLink in more than one place. */
#ifndef SIM_LINKS_H
#define SIM_LINKS_H

#include "call.h"

/* NOT_SUPPORTED where the GPU has no NVLink or is partitioned. */
nvmlReturn_t require_link(const struct gpu *gpu, unsigned link);

/* NVML_NVLINK_VERSION_* */
unsigned link_version(const struct gpu *gpu);

unsigned link_mbps(const struct gpu *gpu);

/* A bus id is DOMAIN:BUS:00.0; GPUs sit in domain 0, NVSwitches, the far end of their links, in domain 1. */
void pci_fill(nvmlPciInfo_t *pci, unsigned domain, unsigned bus, unsigned device_id, unsigned subsystem_id);

/* The same in the older layout. */
void pci_older(const nvmlPciInfo_t *pci, nvmlPciInfo_v2_t *older);

#endif
