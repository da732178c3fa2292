/* nvmlDeviceGetFieldValues: many figures in one call, each with a return code of its own. */
#include <time.h>

#include "api.h"
#include "errors.h"
#include "links.h"
#include "load.h"
#include "sensors.h"

#define FIELD_MAX 512 /* more than any release of NVML has */
#define ALL_LINKS UINT32_MAX /* scope */

enum field {
	ECC_CURRENT = 1,
	ECC_PENDING = 2,
	ECC_SBE_VOL_TOTAL = 3,
	ECC_DBE_VOL_TOTAL = 4,
	ECC_SBE_AGG_TOTAL = 5,
	ECC_DBE_AGG_TOTAL = 6,
	PERF_POLICY_POWER = 74,
	PERF_POLICY_TOTAL_BASE_CLOCKS = 81,
	MEMORY_TEMP = 82,
	TOTAL_ENERGY = 83,
	NVLINK_SPEED_L0 = 84,
	NVLINK_SPEED_L5 = 89,
	NVLINK_SPEED_COMMON = 90,
	NVLINK_LINK_COUNT = 91,
	PCIE_REPLAY = 94,
	PCIE_REPLAY_ROLLOVER = 95,
	NVLINK_SPEED_L6 = 132,
	NVLINK_SPEED_L11 = 137,
	NVLINK_THROUGHPUT_DATA_TX = 138,
	NVLINK_THROUGHPUT_DATA_RX = 139,
	NVLINK_THROUGHPUT_RAW_TX = 140,
	NVLINK_THROUGHPUT_RAW_RX = 141,
	REMAPPED_COR = 142,
	REMAPPED_FAILURE = 145,
	NVLINK_GET_SPEED = 164,
	NVLINK_GET_STATE = 165,
	NVLINK_GET_VERSION = 166,
	IS_RESETLESS_MIG_SUPPORTED = 184,
	POWER_AVERAGE = 185,
	POWER_INSTANT = 186,
	POWER_DEFAULT_LIMIT = 189,
	POWER_CURRENT_LIMIT = 190,
	ENERGY = 191,
	POWER_REQUESTED_LIMIT = 192,
};

static nvmlReturn_t whole(nvmlFieldValue_t *field, unsigned value)
{
	field->valueType = NVML_VALUE_TYPE_UNSIGNED_INT;
	field->value.uiVal = value;
	return NVML_SUCCESS;
}

static nvmlReturn_t wide(nvmlFieldValue_t *field, unsigned long long value)
{
	field->valueType = NVML_VALUE_TYPE_UNSIGNED_LONG_LONG;
	field->value.ullVal = value;
	return NVML_SUCCESS;
}

/* A figure of one link. */
static nvmlReturn_t of_link(const struct target *t, nvmlFieldValue_t *field, unsigned link, unsigned value)
{
	TRY(require_link(t->gpu, link));
	return whole(field, value);
}

/* KiB that went over one link, or over all of them. */
static nvmlReturn_t over_link(const struct call *call, const struct target *t, nvmlFieldValue_t *field,
			      enum load_kind kind)
{
	unsigned long long all = load_total(&t->gpu->load, kind, call->now) / 1000000 * 1024;

	if (field->scopeId == ALL_LINKS) {
		TRY(require_link(t->gpu, 0));
		return wide(field, all);
	}
	TRY(require_link(t->gpu, field->scopeId));
	return wide(field, all / gpu_model(t->gpu)->nvlinks);
}

static nvmlReturn_t ecc(const struct target *t, nvmlFieldValue_t *field)
{
	unsigned number = field->fieldId - ECC_SBE_VOL_TOTAL;
	unsigned long long count;

	TRY(errors_count(t, number % 2, number / 2, NVML_MEMORY_LOCATION_COUNT, &count));
	return wide(field, count);
}

static nvmlReturn_t fill(const struct call *call, const struct target *t, nvmlFieldValue_t *field)
{
	unsigned id = field->fieldId, limit_mw = gpu_model(t->gpu)->power_limit_w * 1000;

	if (id == 0 || id >= FIELD_MAX)
		return NVML_ERROR_INVALID_ARGUMENT;
	if (id >= ECC_SBE_VOL_TOTAL && id <= ECC_DBE_AGG_TOTAL)
		return ecc(t, field);
	if (t->ci)
		return NVML_ERROR_NOT_SUPPORTED; /* a MIG device has no more fields of its own */
	switch (id) {
	case ECC_CURRENT:
	case ECC_PENDING: return wide(field, 1);
	case PERF_POLICY_POWER ... PERF_POLICY_TOTAL_BASE_CLOCKS: return wide(field, 0);
	case MEMORY_TEMP: return whole(field, sensor_celsius());
	case TOTAL_ENERGY:
	case ENERGY: return wide(field, sensor_millijoule(call, t->gpu));
	case NVLINK_SPEED_L0 ... NVLINK_SPEED_L5:
		return of_link(t, field, id - NVLINK_SPEED_L0, link_mbps(t->gpu));
	case NVLINK_SPEED_L6 ... NVLINK_SPEED_L11:
		return of_link(t, field, id - NVLINK_SPEED_L6 + 6, link_mbps(t->gpu));
	case NVLINK_SPEED_COMMON: return of_link(t, field, 0, link_mbps(t->gpu));
	case NVLINK_LINK_COUNT: return of_link(t, field, 0, gpu_model(t->gpu)->nvlinks);
	case NVLINK_GET_SPEED: return of_link(t, field, field->scopeId, link_mbps(t->gpu));
	case NVLINK_GET_STATE: return of_link(t, field, field->scopeId, 1);
	case NVLINK_GET_VERSION: return of_link(t, field, field->scopeId, link_version(t->gpu));
	case NVLINK_THROUGHPUT_DATA_TX:
	case NVLINK_THROUGHPUT_RAW_TX: return over_link(call, t, field, LOAD_NVLINK_TX);
	case NVLINK_THROUGHPUT_DATA_RX:
	case NVLINK_THROUGHPUT_RAW_RX: return over_link(call, t, field, LOAD_NVLINK_RX);
	case PCIE_REPLAY:
	case PCIE_REPLAY_ROLLOVER: return whole(field, 0);
	case REMAPPED_COR ... REMAPPED_FAILURE: return wide(field, 0);
	case IS_RESETLESS_MIG_SUPPORTED: return whole(field, gpu_model(t->gpu)->arch >= NVML_DEVICE_ARCH_HOPPER);
	case POWER_AVERAGE:
	case POWER_INSTANT: return whole(field, sensor_milliwatt(t->gpu));
	case POWER_DEFAULT_LIMIT:
	case POWER_CURRENT_LIMIT:
	case POWER_REQUESTED_LIMIT: return whole(field, limit_mw);
	default: return NVML_ERROR_NOT_SUPPORTED;
	}
}

nvmlReturn_t field_values(struct call *call, nvmlDevice_t device, int count, nvmlFieldValue_t *values)
{
	struct timespec now;
	struct target t;

	TRY(resolve_device(call, device, &t));
	if (count <= 0 || !values)
		return NVML_ERROR_INVALID_ARGUMENT;
	clock_gettime(CLOCK_REALTIME, &now);
	for (int i = 0; i < count; i++) {
		values[i].timestamp = (long long)now.tv_sec * 1000000 + now.tv_nsec / 1000;
		values[i].latencyUsec = 0;
		values[i].value.ullVal = 0;
		values[i].nvmlReturn = fill(call, &t, &values[i]);
	}
	return NVML_SUCCESS;
}
