/* Memory errors: none has ever happened. What may be asked of which device is as NVML documents it: on a partitioned
 * GPU volatile counters belong to the MIG devices, and those count uncorrected errors outside DRAM only. */
#include "errors.h"

#include "api.h"
nvmlReturn_t errors_count(const struct target *t, unsigned type, unsigned counter, unsigned location,
			  unsigned long long *count)
{
	if (!count || type > NVML_MEMORY_ERROR_TYPE_UNCORRECTED || counter > NVML_AGGREGATE_ECC ||
	    location > NVML_MEMORY_LOCATION_COUNT)
		return NVML_ERROR_INVALID_ARGUMENT;
	if (t->ci && (counter != NVML_VOLATILE_ECC || type != NVML_MEMORY_ERROR_TYPE_UNCORRECTED ||
		      location == NVML_MEMORY_LOCATION_DRAM))
		return NVML_ERROR_NOT_SUPPORTED;
	if (!t->ci && t->gpu->mig_current && counter == NVML_VOLATILE_ECC)
		return NVML_ERROR_NOT_SUPPORTED;
	/* Ampere and later tell DRAM from SRAM and no more */
	if (location != NVML_MEMORY_LOCATION_DRAM && location != NVML_MEMORY_LOCATION_SRAM &&
	    location != NVML_MEMORY_LOCATION_COUNT)
		return NVML_ERROR_NOT_SUPPORTED;
	*count = 0;
	return NVML_SUCCESS;
}

nvmlReturn_t ecc_total(struct call *call, nvmlDevice_t device, unsigned type, unsigned counter,
		       unsigned long long *count)
{
	struct target t;

	TRY(resolve_device(call, device, &t));
	return errors_count(&t, type, counter, NVML_MEMORY_LOCATION_COUNT, count);
}

nvmlReturn_t ecc_counter(struct call *call, nvmlDevice_t device, unsigned type, unsigned counter, unsigned location,
			 unsigned long long *count)
{
	struct target t;

	TRY(resolve_device(call, device, &t));
	if (location >= NVML_MEMORY_LOCATION_COUNT)
		return NVML_ERROR_INVALID_ARGUMENT;
	return errors_count(&t, type, counter, location, count);
}

/* Deprecated in favour of ecc_counter, and not served for GPUs as new as these. */
nvmlReturn_t ecc_detailed(struct call *call, nvmlDevice_t device, unsigned type, unsigned counter, void *counts)
{
	struct target t;

	(void)type;
	(void)counter;
	TRY(resolve_gpu(call, device, &t));
	return counts ? NVML_ERROR_NOT_SUPPORTED : NVML_ERROR_INVALID_ARGUMENT;
}

/* Row remapping has taken the place of page retirement. */
nvmlReturn_t retired_pages(struct call *call, nvmlDevice_t device, unsigned cause, unsigned *count,
			   unsigned long long *pages)
{
	struct target t;

	(void)pages;
	TRY(resolve_gpu(call, device, &t));
	return count && cause <= 1 ? NVML_ERROR_NOT_SUPPORTED : NVML_ERROR_INVALID_ARGUMENT;
}

nvmlReturn_t retired_pending(struct call *call, nvmlDevice_t device, unsigned *pending)
{
	struct target t;

	TRY(resolve_gpu(call, device, &t));
	return pending ? NVML_ERROR_NOT_SUPPORTED : NVML_ERROR_INVALID_ARGUMENT;
}

nvmlReturn_t remapped_rows(struct call *call, nvmlDevice_t device, unsigned *corrected, unsigned *uncorrected,
			   unsigned *pending, unsigned *failure)
{
	struct target t;

	TRY(resolve_gpu(call, device, &t));
	if (!corrected || !uncorrected || !pending || !failure)
		return NVML_ERROR_INVALID_ARGUMENT;
	*corrected = *uncorrected = *pending = *failure = 0;
	return NVML_SUCCESS;
}
