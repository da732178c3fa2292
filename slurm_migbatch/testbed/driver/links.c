/* NVLink, and how GPUs hang together. */
#include <string.h>

#include "api.h"
#include "links.h"

#define NVLINK_MAX_LINKS 18
#define NVLINK_CAP_COUNT 6
#define NVLINK_ERROR_COUNT 5
#define TOPOLOGY_INTERNAL 0
#define TOPOLOGY_NODE 40
#define TOPOLOGY_SYSTEM 50
#define P2P_CAPS_COUNT 5
#define P2P_CAPS_NVLINK 2
#define P2P_STATUS_OK 0
#define P2P_STATUS_NOT_SUPPORTED 5

/* NVLink is out of reach while the GPU is partitioned. */
nvmlReturn_t require_link(const struct gpu *gpu, unsigned link)
{
	if (gpu->mig_current || gpu_model(gpu)->nvlinks == 0)
		return NVML_ERROR_NOT_SUPPORTED;
	return link < gpu_model(gpu)->nvlinks && link < NVLINK_MAX_LINKS ? NVML_SUCCESS : NVML_ERROR_INVALID_ARGUMENT;
}

unsigned link_version(const struct gpu *gpu)
{
	enum { VERSION_3_0 = 4, VERSION_4_0 = 6, VERSION_5_0 = 7 };

	switch (gpu_model(gpu)->arch) {
	case NVML_DEVICE_ARCH_AMPERE: return VERSION_3_0;
	case NVML_DEVICE_ARCH_HOPPER: return VERSION_4_0;
	default: return VERSION_5_0;
	}
}

unsigned link_mbps(const struct gpu *gpu)
{
	switch (gpu_model(gpu)->arch) {
	case NVML_DEVICE_ARCH_AMPERE: return 25000;
	case NVML_DEVICE_ARCH_HOPPER: return 26562;
	default: return 53125;
	}
}

static nvmlReturn_t nvlink(struct call *call, nvmlDevice_t device, unsigned link, const void *out, struct target *t)
{
	TRY(resolve_gpu(call, device, t));
	TRY(require_link(t->gpu, link));
	return out ? NVML_SUCCESS : NVML_ERROR_INVALID_ARGUMENT;
}

nvmlReturn_t device_nvlink_state(struct call *call, nvmlDevice_t device, unsigned link, unsigned *active)
{
	struct target t;

	TRY(nvlink(call, device, link, active, &t));
	*active = 1;
	return NVML_SUCCESS;
}

nvmlReturn_t device_nvlink_version(struct call *call, nvmlDevice_t device, unsigned link, unsigned *version)
{
	struct target t;

	TRY(nvlink(call, device, link, version, &t));
	*version = link_version(t.gpu);
	return NVML_SUCCESS;
}

nvmlReturn_t device_nvlink_capability(struct call *call, nvmlDevice_t device, unsigned link, unsigned capability,
				      unsigned *has)
{
	struct target t;

	TRY(nvlink(call, device, link, has, &t));
	if (capability >= NVLINK_CAP_COUNT)
		return NVML_ERROR_INVALID_ARGUMENT;
	*has = 1;
	return NVML_SUCCESS;
}

nvmlReturn_t device_nvlink_errors(struct call *call, nvmlDevice_t device, unsigned link, unsigned counter,
				  unsigned long long *count)
{
	struct target t;

	TRY(nvlink(call, device, link, count, &t));
	if (counter >= NVLINK_ERROR_COUNT)
		return NVML_ERROR_INVALID_ARGUMENT;
	*count = 0;
	return NVML_SUCCESS;
}

nvmlReturn_t device_nvlink_remote(struct call *call, nvmlDevice_t device, unsigned link, nvmlPciInfo_t *pci)
{
	struct target t;

	TRY(nvlink(call, device, link, pci, &t));
	pci_fill(pci, 1, link % 6, 0x22A310DE, 0x000010DE);
	return NVML_SUCCESS;
}

nvmlReturn_t device_nvlink_remote_v1(struct call *call, nvmlDevice_t device, unsigned link, nvmlPciInfo_v2_t *pci)
{
	nvmlPciInfo_t newer;

	TRY(device_nvlink_remote(call, device, link, pci ? &newer : NULL));
	pci_older(&newer, pci);
	return NVML_SUCCESS;
}

/* --- topology: every GPU on a host bridge of its own, all on one NUMA node ------- */

nvmlReturn_t topology_ancestor(struct call *call, nvmlDevice_t one, nvmlDevice_t other, unsigned *level)
{
	struct target a, b;

	TRY(resolve_gpu(call, one, &a));
	TRY(resolve_gpu(call, other, &b));
	if (!level)
		return NVML_ERROR_INVALID_ARGUMENT;
	*level = a.index == b.index ? TOPOLOGY_INTERNAL : TOPOLOGY_NODE;
	return NVML_SUCCESS;
}

nvmlReturn_t topology_nearest(struct call *call, nvmlDevice_t device, unsigned level, unsigned *count,
			      nvmlDevice_t *devices)
{
	unsigned n = 0, room;
	struct target t;

	TRY(resolve_gpu(call, device, &t));
	if (!count || level > TOPOLOGY_SYSTEM)
		return NVML_ERROR_INVALID_ARGUMENT;
	room = *count;
	for (unsigned g = 0; g < call->body->gpu_count && level == TOPOLOGY_NODE; g++) {
		if (g == t.index)
			continue;
		if (devices && n < room)
			devices[n] = handle_gpu(call, g);
		n++;
	}
	*count = devices && n > room ? room : n;
	return NVML_SUCCESS;
}

nvmlReturn_t p2p_status(struct call *call, nvmlDevice_t one, nvmlDevice_t other, unsigned capability,
			unsigned *status)
{
	struct target a, b;
	bool partitioned, linked;

	TRY(resolve_gpu(call, one, &a));
	TRY(resolve_gpu(call, other, &b));
	if (!status || capability >= P2P_CAPS_COUNT || a.index == b.index)
		return NVML_ERROR_INVALID_ARGUMENT;
	partitioned = a.gpu->mig_current || b.gpu->mig_current;
	linked = gpu_model(a.gpu)->nvlinks && gpu_model(b.gpu)->nvlinks;
	*status = partitioned || a.gpu->model != b.gpu->model || (capability == P2P_CAPS_NVLINK && !linked) ?
			  P2P_STATUS_NOT_SUPPORTED :
			  P2P_STATUS_OK;
	return NVML_SUCCESS;
}
