/* Memory, and the processes that use it. */
#include <string.h>

#include "api.h"
#include "load.h"
#include "process.h"

#define MIB (1024ULL * 1024)
#define NOT_KNOWN 0 /* the driver's own share of an idle GPU is not modelled */

/* Bytes of a GPU or of the instance of a MIG device: compute instances of one GPU instance share its memory. */
static void measure(const struct call *call, const struct target *t, nvmlMemory_v2_t *memory)
{
	uint64_t full = profile_full(gpu_model(t->gpu))->memory_mb;

	if (t->ci) {
		memory->total = gi_profile(t->gpu, t->gi)->memory_mb * MIB;
		memory->reserved = NOT_KNOWN;
		memory->used = process_memory_gi(call->body, t->gi) * MIB;
	} else {
		memory->total = gpu_model(t->gpu)->memory_mib * MIB;
		memory->reserved = (gpu_model(t->gpu)->memory_mib - full) * MIB;
		memory->used = process_memory_gpu(call->body, t->index) * MIB;
	}
	if (memory->used > memory->total - memory->reserved)
		memory->used = memory->total - memory->reserved;
	memory->free = memory->total - memory->reserved - memory->used;
}

nvmlReturn_t memory_info(struct call *call, nvmlDevice_t device, nvmlMemory_t *memory)
{
	nvmlMemory_v2_t v2;
	struct target t;

	TRY(resolve_device_for(call, device, memory, &t));
	measure(call, &t, &v2);
	*memory = (nvmlMemory_t){v2.total, v2.free, v2.used + v2.reserved};
	return NVML_SUCCESS;
}

nvmlReturn_t memory_info_v2(struct call *call, nvmlDevice_t device, nvmlMemory_v2_t *memory)
{
	struct target t;

	TRY(resolve_device_for(call, device, memory, &t));
	if (memory->version != NVML_VERSION_WORD(nvmlMemory_v2_t, 2))
		return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
	measure(call, &t, memory);
	return NVML_SUCCESS;
}

nvmlReturn_t memory_bar1(struct call *call, nvmlDevice_t device, nvmlBAR1Memory_t *memory)
{
	unsigned long long total;
	struct target t;

	TRY(resolve_device_for(call, device, memory, &t));
	total = gpu_model(t.gpu)->bar1_gib * 1024 * MIB; /* an instance has its share */
	if (t.ci)
		total = total * t.gi->size / gpu_model(t.gpu)->memory_slices;
	*memory = (nvmlBAR1Memory_t){total, total, 0};
	return NVML_SUCCESS;
}

/* --- processes --------------------------------------------------------------- */

/* Where a process sits on GPU t->gpu. */
static void locate(const struct target *t, const struct process *process, nvmlProcessInfo_v2_t *info)
{
	*info = (nvmlProcessInfo_v2_t){
		.pid = (unsigned)process->pid,
		.usedGpuMemory = process->memory_mib * MIB,
		.gpuInstanceId = NVML_NO_INSTANCE,
		.computeInstanceId = NVML_NO_INSTANCE,
	};
	for (unsigned i = 0; i < MAX_GIS && process->ci_serial; i++)
		for (unsigned j = 0; j < MAX_CIS; j++)
			if (t->gpu->gi[i].serial && t->gpu->gi[i].ci[j].serial == process->ci_serial) {
				info->gpuInstanceId = i;
				info->computeInstanceId = j;
			}
}

/* Calls `give` for each process on the device; returns their number. */
static unsigned each(struct call *call, const struct target *t,
		     void (*give)(void *out, unsigned n, const nvmlProcessInfo_v2_t *info), void *out)
{
	unsigned n = 0;

	for (unsigned i = 0; i < MAX_PROCESSES; i++) {
		const struct process *process = &call->body->processes[i];
		nvmlProcessInfo_v2_t info;

		if (!process->pid || process->gpu != t->index || (t->ci && process->ci_serial != t->ci->serial) ||
		    !process_holds(process))
			continue;
		locate(t, process, &info);
		if (give)
			give(out, n, &info);
		n++;
	}
	return n;
}

static void give_v1(void *out, unsigned n, const nvmlProcessInfo_v2_t *info)
{
	((nvmlProcessInfo_v1_t *)out)[n] = (nvmlProcessInfo_v1_t){info->pid, info->usedGpuMemory};
}

static void give_v2(void *out, unsigned n, const nvmlProcessInfo_v2_t *info)
{
	((nvmlProcessInfo_v2_t *)out)[n] = *info;
}

static nvmlReturn_t list(struct call *call, nvmlDevice_t device, unsigned *count,
			 void (*give)(void *out, unsigned n, const nvmlProcessInfo_v2_t *info), void *infos)
{
	unsigned n, room;
	struct target t;

	TRY(resolve_device(call, device, &t));
	if (!count || (*count && !infos))
		return NVML_ERROR_INVALID_ARGUMENT;
	room = *count;
	n = each(call, &t, NULL, NULL);
	*count = n;
	if (n > room)
		return NVML_ERROR_INSUFFICIENT_SIZE;
	*count = n ? each(call, &t, give, infos) : 0;
	return NVML_SUCCESS;
}

nvmlReturn_t processes_v1(struct call *call, nvmlDevice_t device, unsigned *count, nvmlProcessInfo_v1_t *infos)
{
	return list(call, device, count, give_v1, infos);
}

nvmlReturn_t processes_v2(struct call *call, nvmlDevice_t device, unsigned *count, nvmlProcessInfo_v2_t *infos)
{
	return list(call, device, count, give_v2, infos);
}

static void give_detail(void *out, unsigned n, const nvmlProcessInfo_v2_t *info)
{
	((nvmlProcessDetail_v1_t *)out)[n] = (nvmlProcessDetail_v1_t){
		.pid = info->pid,
		.usedGpuMemory = info->usedGpuMemory,
		.gpuInstanceId = info->gpuInstanceId,
		.computeInstanceId = info->computeInstanceId,
	};
}

nvmlReturn_t process_details(struct call *call, nvmlDevice_t device, nvmlProcessDetailList_v1_t *out)
{
	enum { MODE_COMPUTE, MODE_GRAPHICS, MODE_MPS };
	struct target t;

	TRY(resolve_device_for(call, device, out, &t));
	if (out->version != NVML_VERSION_WORD(nvmlProcessDetailList_v1_t, 1))
		return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
	if (out->mode > MODE_MPS)
		return NVML_ERROR_INVALID_ARGUMENT;
	if (gpu_model(t.gpu)->arch < NVML_DEVICE_ARCH_HOPPER)
		return NVML_ERROR_NOT_SUPPORTED;
	if (out->mode != MODE_COMPUTE)
		return processes_none(call, device, &out->numProcArrayEntries, out->procArray);
	return list(call, device, &out->numProcArrayEntries, give_detail, out->procArray);
}

/* No simulated GPU runs in confidential mode: all memory is unprotected. */
nvmlReturn_t memory_confidential(struct call *call, nvmlDevice_t device, nvmlConfComputeMemSizeInfo_t *info)
{
	struct target t;

	TRY(resolve_gpu_for(call, device, info, &t));
	if (gpu_model(t.gpu)->arch < NVML_DEVICE_ARCH_HOPPER)
		return NVML_ERROR_NOT_SUPPORTED;
	*info = (nvmlConfComputeMemSizeInfo_t){0, gpu_model(t.gpu)->memory_mib * 1024ULL};
	return NVML_SUCCESS;
}

/* Nothing draws, and no MPS server runs, on a simulated GPU. */
nvmlReturn_t processes_none(struct call *call, nvmlDevice_t device, unsigned *count, void *infos)
{
	struct target t;

	TRY(resolve_device(call, device, &t));
	if (!count || (*count && !infos))
		return NVML_ERROR_INVALID_ARGUMENT;
	*count = 0;
	return NVML_SUCCESS;
}

nvmlReturn_t process_utilization(struct call *call, nvmlDevice_t device, nvmlProcessUtilizationSample_t *samples,
				 unsigned *count, unsigned long long since)
{
	struct target t;
	unsigned n;

	(void)since;
	TRY(resolve_gpu_for(call, device, count, &t));
	if (t.gpu->mig_current)
		return NVML_ERROR_NOT_SUPPORTED;
	n = each(call, &t, NULL, NULL);
	if (!n)
		return NVML_ERROR_NOT_FOUND;
	if (!samples || *count < n) {
		*count = n;
		return NVML_ERROR_INSUFFICIENT_SIZE;
	}
	n = 0;
	for (unsigned i = 0; i < MAX_PROCESSES; i++) {
		const struct process *process = &call->body->processes[i];

		if (!process->pid || process->gpu != t.index || !process_holds(process) || n == *count)
			continue;
		samples[n++] = (nvmlProcessUtilizationSample_t){
			.pid = (unsigned)process->pid,
			.timeStamp = (unsigned long long)call->now / 1000,
			.smUtil = t.gpu->load.rate[LOAD_SM] * 100 / LOAD_FULL,
			.memUtil = t.gpu->load.rate[LOAD_DRAM] * 100 / LOAD_FULL,
		};
	}
	*count = n;
	return NVML_SUCCESS;
}
