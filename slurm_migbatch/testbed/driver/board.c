/* The board: its firmware, its PCI Express link, and what no simulated GPU has. */
#include <string.h>

#include "api.h"
#include "load.h"

#define VBIOS_VERSION "96.00.00.00.01"
#define INFOROM_VERSION "G500.0200.00.05"
#define INFOROM_OBJECT "2.0"
#define INFOROM_OBJECTS 3
#define PCIE_WIDTH 16
#define PCIE_UTIL_COUNT 2
#define ACCOUNTING_BUFFER 4000

/* For what only other systems or other boards have. */
static nvmlReturn_t absent(struct call *call, nvmlDevice_t device, const void *out)
{
	struct target t;

	TRY(resolve_gpu_for(call, device, out, &t));
	return NVML_ERROR_NOT_SUPPORTED;
}

/* Windows has driver models. */
nvmlReturn_t driver_model(struct call *call, nvmlDevice_t device, unsigned *current, unsigned *pending)
{
	return absent(call, device, current ? current : pending);
}

nvmlReturn_t operation_mode(struct call *call, nvmlDevice_t device, unsigned *current, unsigned *pending)
{
	return absent(call, device, current && pending ? current : NULL);
}

nvmlReturn_t auto_boost(struct call *call, nvmlDevice_t device, unsigned *enabled, unsigned *by_default)
{
	return absent(call, device, enabled && by_default ? enabled : NULL);
}

nvmlReturn_t bridge_chips(struct call *call, nvmlDevice_t device, void *chips)
{
	return absent(call, device, chips);
}

nvmlReturn_t license_features(struct call *call, nvmlDevice_t device, void *features)
{
	return absent(call, device, features);
}

nvmlReturn_t vbios_version(struct call *call, nvmlDevice_t device, char *text, unsigned length)
{
	struct target t;

	TRY(resolve_gpu_for(call, device, text, &t));
	return give_text(text, length, VBIOS_VERSION);
}

nvmlReturn_t inforom_image(struct call *call, nvmlDevice_t device, char *text, unsigned length)
{
	struct target t;

	TRY(resolve_gpu_for(call, device, text, &t));
	return give_text(text, length, INFOROM_VERSION);
}

nvmlReturn_t inforom_object(struct call *call, nvmlDevice_t device, unsigned object, char *text, unsigned length)
{
	struct target t;

	TRY(resolve_gpu_for(call, device, text, &t));
	if (object >= INFOROM_OBJECTS)
		return NVML_ERROR_INVALID_ARGUMENT;
	return give_text(text, length, INFOROM_OBJECT);
}

nvmlReturn_t board_id(struct call *call, nvmlDevice_t device, unsigned *id)
{
	struct target t;

	TRY(resolve_gpu_for(call, device, id, &t));
	*id = t.index;
	return NVML_SUCCESS;
}

nvmlReturn_t multi_gpu_board(struct call *call, nvmlDevice_t device, unsigned *several)
{
	return give_number(call, device, several, 0);
}

nvmlReturn_t accounting_mode(struct call *call, nvmlDevice_t device, unsigned *mode)
{
	return give_number(call, device, mode, 0);
}

nvmlReturn_t accounting_buffer(struct call *call, nvmlDevice_t device, unsigned *size)
{
	return give_number(call, device, size, ACCOUNTING_BUFFER);
}

nvmlReturn_t accounting_pids(struct call *call, nvmlDevice_t device, unsigned *count, unsigned *pids)
{
	struct target t;

	(void)pids;
	TRY(resolve_gpu_for(call, device, count, &t));
	*count = 0;
	return NVML_SUCCESS;
}

nvmlReturn_t temperature_threshold(struct call *call, nvmlDevice_t device, unsigned type, unsigned *celsius)
{
	/* by NVML_TEMPERATURE_THRESHOLD_*: shutdown, slowdown, memory, GPU, acoustic ones and GPS */
	static const unsigned thresholds[] = {95, 89, 95, 87, 0, 0, 0, 0};
	struct target t;

	TRY(resolve_gpu_for(call, device, celsius, &t));
	if (type >= sizeof(thresholds) / sizeof(thresholds[0]))
		return NVML_ERROR_INVALID_ARGUMENT;
	if (!thresholds[type])
		return NVML_ERROR_NOT_SUPPORTED;
	*celsius = thresholds[type];
	return NVML_SUCCESS;
}

nvmlReturn_t event_reasons(struct call *call, nvmlDevice_t device, unsigned long long *reasons)
{
	struct target t;

	TRY(resolve_gpu_for(call, device, reasons, &t));
	*reasons = 0;
	return NVML_SUCCESS;
}

/* --- PCI Express ---------------------------------------------------------------- */

nvmlReturn_t pcie_generation(struct call *call, nvmlDevice_t device, unsigned *generation)
{
	struct target t;

	TRY(resolve_gpu_for(call, device, generation, &t));
	*generation = gpu_model(t.gpu)->arch == NVML_DEVICE_ARCH_AMPERE ? 4 : 5;
	return NVML_SUCCESS;
}

nvmlReturn_t pcie_width(struct call *call, nvmlDevice_t device, unsigned *width)
{
	return give_number(call, device, width, PCIE_WIDTH);
}

nvmlReturn_t pcie_replays(struct call *call, nvmlDevice_t device, unsigned *count)
{
	return give_number(call, device, count, 0);
}

/* KB/s; a MIG device has no traffic of its own. */
nvmlReturn_t pcie_throughput(struct call *call, nvmlDevice_t device, unsigned counter, unsigned *rate)
{
	struct target t;

	TRY(resolve_gpu_for(call, device, rate, &t));
	if (counter >= PCIE_UTIL_COUNT)
		return NVML_ERROR_INVALID_ARGUMENT;
	*rate = t.gpu->load.rate[counter == 0 ? LOAD_PCIE_TX : LOAD_PCIE_RX] * 1024;
	return NVML_SUCCESS;
}
