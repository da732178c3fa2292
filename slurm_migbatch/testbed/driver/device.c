/* Who a device is: handles by index, UUID and bus id; name, minor, PCI, links. */
#define _GNU_SOURCE
#include <stdio.h>
#include <string.h>
#include <strings.h>
#include <sys/sysinfo.h>

#include "api.h"
#include "links.h"
#include "mig.h"

#define COMPUTE_MODE_DEFAULT 0
#define VIRTUALIZATION_NONE 0
#define BRAND_NVIDIA 14

static unsigned pci_bus(unsigned index)
{
	return 0x07 + 8 * index;
}

void pci_fill(nvmlPciInfo_t *pci, unsigned domain, unsigned bus, unsigned device_id, unsigned subsystem_id)
{
	memset(pci, 0, sizeof(*pci));
	pci->domain = domain;
	pci->bus = bus;
	pci->pciDeviceId = device_id;
	pci->pciSubSystemId = subsystem_id;
	snprintf(pci->busIdLegacy, sizeof(pci->busIdLegacy), "%04X:%02X:00.0", domain & 0xFFFF, bus & 0xFF);
	snprintf(pci->busId, sizeof(pci->busId), "%08X:%02X:00.0", domain, bus);
}

void pci_older(const nvmlPciInfo_t *pci, nvmlPciInfo_v2_t *older)
{
	*older = (nvmlPciInfo_v2_t){
		.domain = pci->domain,
		.bus = pci->bus,
		.device = pci->device,
		.pciDeviceId = pci->pciDeviceId,
		.pciSubSystemId = pci->pciSubSystemId,
	};
	memcpy(older->busId, pci->busIdLegacy, sizeof(older->busId));
}

static nvmlReturn_t give_gpu(struct call *call, unsigned index, nvmlDevice_t *out)
{
	if (call->body->gpus[index].lost)
		return NVML_ERROR_GPU_IS_LOST;
	*out = handle_gpu(call, index);
	return NVML_SUCCESS;
}

nvmlReturn_t device_by_index(struct call *call, unsigned index, nvmlDevice_t *out)
{
	if (!out || index >= call->body->gpu_count)
		return NVML_ERROR_INVALID_ARGUMENT;
	return give_gpu(call, index, out);
}

nvmlReturn_t device_by_uuid(struct call *call, const char *uuid, nvmlDevice_t *out)
{
	uint8_t wanted[16];
	bool mig;

	if (!uuid || !out)
		return NVML_ERROR_INVALID_ARGUMENT;
	mig = !strncmp(uuid, "MIG-", 4);
	if ((!mig && strncmp(uuid, "GPU-", 4)) || !uuid_parse(uuid + 4, wanted))
		return NVML_ERROR_NOT_FOUND;
	for (unsigned g = 0; g < call->body->gpu_count; g++) {
		const struct gpu *gpu = &call->body->gpus[g];

		if (!mig && !memcmp(gpu->uuid, wanted, 16))
			return give_gpu(call, g, out);
		for (unsigned i = 0; mig && i < MAX_GIS; i++)
			for (unsigned j = 0; j < MAX_CIS && gi_visible(&gpu->gi[i], call->now); j++) {
				const struct ci *ci = &gpu->gi[i].ci[j];

				if (!ci_visible(ci, call->now) || memcmp(ci->uuid, wanted, 16))
					continue;
				if (gpu->lost)
					return NVML_ERROR_GPU_IS_LOST;
				*out = handle_mig(g, i, j, ci);
				return NVML_SUCCESS;
			}
	}
	return NVML_ERROR_NOT_FOUND;
}

nvmlReturn_t device_by_pci(struct call *call, const char *bus_id, nvmlDevice_t *out)
{
	unsigned domain = 0, bus, device, function;

	if (!bus_id || !out)
		return NVML_ERROR_INVALID_ARGUMENT;
	if (sscanf(bus_id, "%x:%x:%x.%x", &domain, &bus, &device, &function) != 4) {
		domain = 0;
		if (sscanf(bus_id, "%x:%x.%x", &bus, &device, &function) != 3)
			return NVML_ERROR_INVALID_ARGUMENT;
	}
	for (unsigned g = 0; g < call->body->gpu_count; g++)
		if (domain == 0 && bus == pci_bus(g) && device == 0 && function == 0)
			return give_gpu(call, g, out);
	return NVML_ERROR_NOT_FOUND;
}

/* Board serial numbers are made from the GPU's UUID, 13 digits as on real boards. */
static void serial_text(const struct gpu *gpu, char text[16])
{
	uint64_t number = 0;

	for (unsigned i = 0; i < 6; i++)
		number = number << 8 | gpu->uuid[i];
	snprintf(text, 16, "1%012llu", (unsigned long long)(number % 1000000000000ULL));
}

nvmlReturn_t device_by_serial(struct call *call, const char *serial, nvmlDevice_t *out)
{
	if (!serial || !out)
		return NVML_ERROR_INVALID_ARGUMENT;
	for (unsigned g = 0; g < call->body->gpu_count; g++) {
		char text[16];

		serial_text(&call->body->gpus[g], text);
		if (!strcmp(text, serial))
			return give_gpu(call, g, out);
	}
	return NVML_ERROR_NOT_FOUND;
}

nvmlReturn_t device_name(struct call *call, nvmlDevice_t device, char *name, unsigned length)
{
	char text[96], instance[48];
	struct target t;

	TRY(resolve_device(call, device, &t));
	if (t.ci) {
		ci_name(&t, instance, sizeof(instance));
		snprintf(text, sizeof(text), "%s MIG %s", gpu_model(t.gpu)->name, instance);
		return give_text(name, length, text);
	}
	return give_text(name, length, gpu_model(t.gpu)->name);
}

nvmlReturn_t device_uuid(struct call *call, nvmlDevice_t device, char *uuid, unsigned length)
{
	char text[4 + UUID_TEXT];
	struct target t;

	TRY(resolve_device(call, device, &t));
	memcpy(text, t.ci ? "MIG-" : "GPU-", 4);
	uuid_text(t.ci ? t.ci->uuid : t.gpu->uuid, text + 4);
	return give_text(uuid, length, text);
}

nvmlReturn_t device_serial(struct call *call, nvmlDevice_t device, char *text, unsigned length)
{
	char serial[16];
	struct target t;

	TRY(resolve_gpu(call, device, &t));
	serial_text(t.gpu, serial);
	return give_text(text, length, serial);
}

nvmlReturn_t device_index(struct call *call, nvmlDevice_t device, unsigned *index)
{
	struct target t;

	TRY(resolve_device_for(call, device, index, &t));
	*index = t.ci ? mig_index(call, &t) : t.index;
	return NVML_SUCCESS;
}

nvmlReturn_t device_minor(struct call *call, nvmlDevice_t device, unsigned *minor)
{
	struct target t;

	TRY(resolve_device_for(call, device, minor, &t));
	*minor = t.gpu->minor;
	return NVML_SUCCESS;
}

nvmlReturn_t device_brand(struct call *call, nvmlDevice_t device, unsigned *brand)
{
	struct target t;

	TRY(resolve_device_for(call, device, brand, &t));
	*brand = BRAND_NVIDIA;
	return NVML_SUCCESS;
}

nvmlReturn_t device_pci(struct call *call, nvmlDevice_t device, nvmlPciInfo_t *pci)
{
	struct target t;

	TRY(resolve_device_for(call, device, pci, &t));
	pci_fill(pci, 0, pci_bus(t.index), gpu_model(t.gpu)->pci_device_id, gpu_model(t.gpu)->pci_subsystem_id);
	return NVML_SUCCESS;
}

nvmlReturn_t device_pci_v2(struct call *call, nvmlDevice_t device, nvmlPciInfo_v2_t *pci)
{
	nvmlPciInfo_t v3;

	TRY(device_pci(call, device, pci ? &v3 : NULL));
	pci_older(&v3, pci);
	return NVML_SUCCESS;
}

nvmlReturn_t device_architecture(struct call *call, nvmlDevice_t device, unsigned *arch)
{
	struct target t;

	TRY(resolve_device_for(call, device, arch, &t));
	*arch = gpu_model(t.gpu)->arch;
	return NVML_SUCCESS;
}

nvmlReturn_t device_capability(struct call *call, nvmlDevice_t device, int *major, int *minor)
{
	struct target t;

	TRY(resolve_device_for(call, device, minor ? major : NULL, &t));
	*major = (int)gpu_model(t.gpu)->cc_major;
	*minor = (int)gpu_model(t.gpu)->cc_minor;
	return NVML_SUCCESS;
}

nvmlReturn_t device_cores(struct call *call, nvmlDevice_t device, unsigned *cores)
{
	struct target t;

	TRY(resolve_gpu_for(call, device, cores, &t));
	*cores = gpu_model(t.gpu)->cores;
	return NVML_SUCCESS;
}

nvmlReturn_t device_bus_width(struct call *call, nvmlDevice_t device, unsigned *bits)
{
	struct target t;

	TRY(resolve_gpu_for(call, device, bits, &t));
	*bits = gpu_model(t.gpu)->bus_width;
	return NVML_SUCCESS;
}

/* All CPUs: the simulated GPUs hang on no particular socket. */
nvmlReturn_t device_cpu_affinity(struct call *call, nvmlDevice_t device, unsigned size, unsigned long *set)
{
	const unsigned bits = 8 * sizeof(*set);
	unsigned cpus = (unsigned)get_nprocs();
	struct target t;

	TRY(resolve_device_for(call, device, size ? set : NULL, &t));
	memset(set, 0, size * sizeof(*set));
	for (unsigned cpu = 0; cpu < cpus && cpu / bits < size; cpu++)
		set[cpu / bits] |= 1UL << (cpu % bits);
	return NVML_SUCCESS;
}

nvmlReturn_t device_persistence(struct call *call, nvmlDevice_t device, unsigned *mode)
{
	return give_number(call, device, mode, 1);
}

nvmlReturn_t device_compute_mode(struct call *call, nvmlDevice_t device, unsigned *mode)
{
	return give_number(call, device, mode, COMPUTE_MODE_DEFAULT);
}

nvmlReturn_t device_virtualization(struct call *call, nvmlDevice_t device, unsigned *mode)
{
	return give_number(call, device, mode, VIRTUALIZATION_NONE);
}

nvmlReturn_t device_display(struct call *call, nvmlDevice_t device, unsigned *active)
{
	return give_number(call, device, active, 0);
}

nvmlReturn_t device_ecc(struct call *call, nvmlDevice_t device, unsigned *current, unsigned *pending)
{
	struct target t;

	TRY(resolve_gpu_for(call, device, pending ? current : NULL, &t));
	*current = *pending = 1;
	return NVML_SUCCESS;
}
