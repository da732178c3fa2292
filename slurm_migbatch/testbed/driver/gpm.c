/* GPU performance monitoring: samples of counters, and metrics from two of them. Hopper and later. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "api.h"
#include "load.h"

/* Lives in the process that asked for it; the list tells a sample from any other pointer. */
struct gpm_sample {
	struct gpm_sample *next;
	bool filled;
	unsigned gpu, gi_id; /* NVML_NO_INSTANCE: the whole GPU */
	uint64_t serial;     /* of the instance or the boot: what was made anew starts from zero */
	int64_t taken;	     /* us, as loads count */
	uint64_t total[LOAD_COUNT];
	unsigned decoders, jpegs, ofas, nvlinks;
};

static struct gpm_sample *samples; /* under the session's mutex, as every call is */

static struct gpm_sample **find(const struct gpm_sample *sample)
{
	struct gpm_sample **at = &samples;

	while (*at && *at != sample)
		at = &(*at)->next;
	return at;
}

static nvmlReturn_t require_gpm(const struct target *t)
{
	return gpu_model(t->gpu)->arch >= NVML_DEVICE_ARCH_HOPPER ? NVML_SUCCESS : NVML_ERROR_NOT_SUPPORTED;
}

nvmlReturn_t gpm_support(struct call *call, nvmlDevice_t device, nvmlGpmSupport_t *support)
{
	struct target t;

	TRY(resolve_gpu_for(call, device, support, &t));
	if (support->version != NVML_GPM_SUPPORT_VERSION)
		return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
	support->isSupportedDevice = require_gpm(&t) == NVML_SUCCESS;
	return NVML_SUCCESS;
}

nvmlReturn_t gpm_alloc(struct call *call, nvmlGpmSample_t *out)
{
	struct gpm_sample *sample;

	(void)call;
	if (!out)
		return NVML_ERROR_INVALID_ARGUMENT;
	sample = calloc(1, sizeof(*sample));
	if (!sample)
		return NVML_ERROR_MEMORY;
	sample->next = samples;
	samples = sample;
	*out = sample;
	return NVML_SUCCESS;
}

nvmlReturn_t gpm_free(struct call *call, nvmlGpmSample_t sample)
{
	struct gpm_sample **at = find(sample);

	(void)call;
	if (!sample || !*at)
		return NVML_ERROR_INVALID_ARGUMENT;
	*at = sample->next;
	free(sample);
	return NVML_SUCCESS;
}

static void fill(const struct call *call, struct gpm_sample *sample, const struct target *t, const struct load *load,
		 const struct profile *profile)
{
	sample->filled = true;
	sample->gpu = t->index;
	sample->gi_id = t->gi ? t->gi_id : NVML_NO_INSTANCE;
	sample->serial = t->gi ? t->gi->serial : call->body->boots;
	sample->taken = call->now / 1000;
	for (unsigned kind = 0; kind < LOAD_COUNT; kind++)
		sample->total[kind] = load_total(load, kind, call->now);
	sample->decoders = profile->dec;
	sample->jpegs = profile->jpeg;
	sample->ofas = profile->ofa;
	sample->nvlinks = t->gpu->mig_current ? 0 : gpu_model(t->gpu)->nvlinks;
}

nvmlReturn_t gpm_sample(struct call *call, nvmlDevice_t device, nvmlGpmSample_t sample)
{
	struct target t;

	TRY(resolve_gpu(call, device, &t));
	if (!sample || !*find(sample))
		return NVML_ERROR_INVALID_ARGUMENT;
	TRY(require_gpm(&t));
	fill(call, sample, &t, &t.gpu->load, profile_full(gpu_model(t.gpu)));
	return NVML_SUCCESS;
}

nvmlReturn_t gpm_sample_mig(struct call *call, nvmlDevice_t device, unsigned gi_id, nvmlGpmSample_t sample)
{
	struct target t;

	TRY(resolve_gpu(call, device, &t));
	if (!sample || !*find(sample))
		return NVML_ERROR_INVALID_ARGUMENT;
	TRY(require_gpm(&t));
	if (!t.gpu->mig_current)
		return NVML_ERROR_INVALID_ARGUMENT;
	if (gi_id >= MAX_GIS || !gi_visible(&t.gpu->gi[gi_id], call->now))
		return NVML_ERROR_NOT_FOUND;
	t.gi_id = gi_id;
	t.gi = &t.gpu->gi[gi_id];
	fill(call, sample, &t, load_of_gi(t.gpu, t.gi), gi_profile(t.gpu, t.gi));
	return NVML_SUCCESS;
}

/* --- metrics ---------------------------------------------------------------- */

static const struct metric {
	unsigned id; /* NVML_GPM_METRIC_* */
	enum load_kind kind;
	const char *name, *about;
} metrics[] = {
	{1, LOAD_GRAPHICS, "gract", "Graphics (Compute/Graphics) Utilization"},
	{2, LOAD_SM, "smutil", "SM Utilization"},
	{3, LOAD_OCCUPANCY, "smocc", "SM Occupancy"},
	{4, LOAD_INTEGER, "intutil", "Integer Utilization"},
	{5, LOAD_TENSOR, "mmaact", "Any Tensor Utilization"},
	{6, LOAD_DFMA, "dfmat", "DFMA Tensor Utilization"},
	{7, LOAD_HMMA, "hmmat", "HMMA Tensor Utilization"},
	{9, LOAD_IMMA, "immat", "IMMA Tensor Utilization"},
	{10, LOAD_DRAM, "dram", "DRAM Bandwidth Utilization"},
	{11, LOAD_FP64, "fp64", "FP64 Utilization"},
	{12, LOAD_FP32, "fp32", "FP32 Utilization"},
	{13, LOAD_FP16, "FP16 Util", "FP16 Utilization"},
	{20, LOAD_PCIE_TX, "PCIe TX", "PCIe Traffic From GPU"},
	{21, LOAD_PCIE_RX, "PCIe RX", "PCIe Traffic To GPU"},
	{60, LOAD_NVLINK_RX, "NVLink RX", "NVLink Read Bandwidth Of All Links"},
	{61, LOAD_NVLINK_TX, "NVLink TX", "NVLink Write Bandwidth Of All Links"},
};

#define METRIC_UNNAMED 8 /* served, though nvml.h has no name for it */
#define METRIC_NVDEC_0 30
#define METRIC_NVJPG_0 40
#define METRIC_NVOFA_0 50
#define METRIC_LAST 1024 /* more than any release of NVML has */
/* The traffic of the memory is NaN, with success, in less time than this. A real driver also said so once over the first
 * 0.3 s of a process, for reasons not known. */
#define DRAM_LEAST_US 100000

static bool engine(unsigned id, const struct gpm_sample *sample)
{
	return (id >= METRIC_NVDEC_0 && id - METRIC_NVDEC_0 < sample->decoders && id < METRIC_NVJPG_0) ||
	       (id >= METRIC_NVJPG_0 && id - METRIC_NVJPG_0 < sample->jpegs && id < METRIC_NVOFA_0) ||
	       (id >= METRIC_NVOFA_0 && id - METRIC_NVOFA_0 < sample->ofas);
}

static nvmlReturn_t measure(nvmlGpmMetric_t *metric, const struct gpm_sample *from, const struct gpm_sample *to)
{
	double took = (double)(to->taken - from->taken);

	memset(&metric->metricInfo, 0, sizeof(metric->metricInfo));
	metric->value = 0;
	if (metric->metricId == 0 || metric->metricId > METRIC_LAST)
		return NVML_ERROR_INVALID_ARGUMENT;
	if (metric->metricId == METRIC_UNNAMED) {
		metric->metricInfo.unit = "%";
		return NVML_SUCCESS;
	}
	if (engine(metric->metricId, to)) {
		metric->metricInfo.shortName = "Engine Util";
		metric->metricInfo.longName = "Engine Utilization";
		metric->metricInfo.unit = "%";
		return NVML_SUCCESS; /* the media engines of a simulated GPU do nothing */
	}
	for (unsigned i = 0; i < sizeof(metrics) / sizeof(metrics[0]); i++) {
		const struct metric *known = &metrics[i];
		bool traffic = load_units[known->kind] == TRAFFIC;

		if (known->id != metric->metricId)
			continue;
		/* traffic is counted for the whole GPU only */
		if (traffic && to->gi_id != NVML_NO_INSTANCE)
			return NVML_ERROR_NOT_SUPPORTED;
		if ((known->kind == LOAD_NVLINK_TX || known->kind == LOAD_NVLINK_RX) && !to->nvlinks)
			return NVML_ERROR_NOT_SUPPORTED;
		metric->metricInfo.shortName = known->name;
		metric->metricInfo.longName = known->about;
		metric->metricInfo.unit = traffic ? "MiB/s" : "%";
		metric->value = (double)(to->total[known->kind] - from->total[known->kind]) / took;
		if (!traffic)
			metric->value /= LOAD_FULL / 100;
		if (known->kind == LOAD_DRAM && took < DRAM_LEAST_US)
			metric->value = NAN;
		return NVML_SUCCESS;
	}
	return NVML_ERROR_NOT_SUPPORTED;
}

nvmlReturn_t gpm_metrics(struct call *call, nvmlGpmMetricsGet_t *get)
{
	const struct gpm_sample *from, *to;

	(void)call;
	if (!get)
		return NVML_ERROR_INVALID_ARGUMENT;
	if (get->version != NVML_GPM_METRICS_GET_VERSION)
		return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
	from = get->sample1;
	to = get->sample2;
	if (!from || !to || !*find(from) || !*find(to) || get->numMetrics == 0 || get->numMetrics > METRIC_LAST)
		return NVML_ERROR_INVALID_ARGUMENT;
	/* two samples of one thing, the earlier one first */
	if (!from->filled || !to->filled || from->gpu != to->gpu || from->gi_id != to->gi_id ||
	    from->serial != to->serial || from->taken >= to->taken)
		return NVML_ERROR_INVALID_ARGUMENT;
	for (unsigned i = 0; i < get->numMetrics; i++)
		get->metrics[i].nvmlReturn = measure(&get->metrics[i], from, to);
	return NVML_SUCCESS;
}
