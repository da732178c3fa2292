/* Temperature, power, utilisation and clocks. Temperature and power are those of an idle GPU, utilisation follows the
 * simulated load; what the real driver hides while a GPU is partitioned is hidden here. */
#include "sensors.h"

#include "api.h"
#include "load.h"

#define IDLE_CELSIUS 34
#define IDLE_WATT_PER_CENT 15 /* of the power limit */
#define PSTATE_0 0
#define CLOCK_STEP_MHZ 15
#define CLOCK_LOWEST_MHZ 210
enum clock_type { CLOCK_GRAPHICS, CLOCK_SM, CLOCK_MEM, CLOCK_VIDEO };

unsigned sensor_celsius(void)
{
	return IDLE_CELSIUS;
}

unsigned sensor_milliwatt(const struct gpu *gpu)
{
	return gpu_model(gpu)->power_limit_w * 10 * IDLE_WATT_PER_CENT;
}

unsigned long long sensor_millijoule(const struct call *call, const struct gpu *gpu)
{
	return (unsigned long long)(call->now / 1000000000) * sensor_milliwatt(gpu);
}

nvmlReturn_t sensor_temperature(struct call *call, nvmlDevice_t device, unsigned which, unsigned *celsius)
{
	struct target t;

	TRY(resolve_gpu_for(call, device, celsius, &t));
	if (which != 0)
		return NVML_ERROR_INVALID_ARGUMENT;
	*celsius = IDLE_CELSIUS;
	return NVML_SUCCESS;
}

nvmlReturn_t sensor_temperature_v(struct call *call, nvmlDevice_t device, nvmlTemperature_v1_t *temperature)
{
	struct target t;

	TRY(resolve_gpu_for(call, device, temperature, &t));
	if (temperature->version != NVML_VERSION_WORD(nvmlTemperature_v1_t, 1))
		return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
	if (temperature->sensorType != 0)
		return NVML_ERROR_INVALID_ARGUMENT;
	temperature->temperature = IDLE_CELSIUS;
	return NVML_SUCCESS;
}

nvmlReturn_t sensor_power(struct call *call, nvmlDevice_t device, unsigned *milliwatt)
{
	struct target t;

	TRY(resolve_gpu_for(call, device, milliwatt, &t));
	*milliwatt = sensor_milliwatt(t.gpu);
	return NVML_SUCCESS;
}

nvmlReturn_t sensor_power_limit(struct call *call, nvmlDevice_t device, unsigned *milliwatt)
{
	struct target t;

	TRY(resolve_gpu_for(call, device, milliwatt, &t));
	*milliwatt = gpu_model(t.gpu)->power_limit_w * 1000;
	return NVML_SUCCESS;
}

nvmlReturn_t sensor_power_range(struct call *call, nvmlDevice_t device, unsigned *lowest, unsigned *highest)
{
	struct target t;

	TRY(resolve_gpu_for(call, device, lowest, &t));
	if (!highest)
		return NVML_ERROR_INVALID_ARGUMENT;
	*highest = gpu_model(t.gpu)->power_limit_w * 1000;
	*lowest = gpu_model(t.gpu)->least_power_w * 1000;
	return NVML_SUCCESS;
}

nvmlReturn_t sensor_power_mode(struct call *call, nvmlDevice_t device, unsigned *mode)
{
	return give_number(call, device, mode, 1);
}

nvmlReturn_t sensor_energy(struct call *call, nvmlDevice_t device, unsigned long long *millijoule)
{
	struct target t;

	TRY(resolve_gpu_for(call, device, millijoule, &t));
	*millijoule = sensor_millijoule(call, t.gpu);
	return NVML_SUCCESS;
}

nvmlReturn_t sensor_utilization(struct call *call, nvmlDevice_t device, nvmlUtilization_t *rates)
{
	struct target t;

	TRY(resolve_gpu_for(call, device, rates, &t));
	if (t.gpu->mig_current)
		return NVML_ERROR_NOT_SUPPORTED;
	*rates = (nvmlUtilization_t){t.gpu->load.rate[LOAD_GRAPHICS] * 100 / LOAD_FULL,
				     t.gpu->load.rate[LOAD_DRAM] * 100 / LOAD_FULL};
	return NVML_SUCCESS;
}

nvmlReturn_t sensor_engine_utilization(struct call *call, nvmlDevice_t device, unsigned *percent, unsigned *period)
{
	struct target t;

	TRY(resolve_gpu_for(call, device, percent, &t));
	if (!period)
		return NVML_ERROR_INVALID_ARGUMENT;
	if (t.gpu->mig_current)
		return NVML_ERROR_NOT_SUPPORTED;
	*percent = 0;
	*period = 167000;
	return NVML_SUCCESS;
}

/* Data-centre cards are cooled by their chassis. */
nvmlReturn_t sensor_fan(struct call *call, nvmlDevice_t device, unsigned *percent)
{
	struct target t;

	TRY(resolve_gpu_for(call, device, percent, &t));
	return NVML_ERROR_NOT_SUPPORTED;
}

nvmlReturn_t sensor_pstate(struct call *call, nvmlDevice_t device, unsigned *pstate)
{
	return give_number(call, device, pstate, PSTATE_0);
}

/* --- clocks ------------------------------------------------------------------ */

static unsigned highest_mhz(const struct model *model, unsigned type)
{
	return type == CLOCK_MEM ? model->memory_mhz : type == CLOCK_VIDEO ? model->video_mhz : model->graphics_mhz;
}

nvmlReturn_t clock_max(struct call *call, nvmlDevice_t device, unsigned type, unsigned *mhz)
{
	struct target t;

	TRY(resolve_gpu_for(call, device, mhz, &t));
	if (type > CLOCK_VIDEO)
		return NVML_ERROR_INVALID_ARGUMENT;
	*mhz = highest_mhz(gpu_model(t.gpu), type);
	return NVML_SUCCESS;
}

nvmlReturn_t clock_application(struct call *call, nvmlDevice_t device, unsigned type, unsigned *mhz)
{
	struct target t;
	unsigned set;

	TRY(clock_max(call, device, type, mhz));
	TRY(resolve_gpu(call, device, &t));
	set = type == CLOCK_MEM ? t.gpu->app_memory_mhz : t.gpu->app_graphics_mhz;
	if (set && set < *mhz)
		*mhz = set;
	return NVML_SUCCESS;
}

/* What the GPU runs at: what applications were given, within what the clock is locked to. */
nvmlReturn_t clock_info(struct call *call, nvmlDevice_t device, unsigned type, unsigned *mhz)
{
	const struct locked *locked;
	struct target t;

	TRY(resolve_gpu_for(call, device, mhz, &t));
	if (type > CLOCK_VIDEO)
		return NVML_ERROR_NOT_SUPPORTED; /* unlike the highest clock of such a type */
	TRY(clock_application(call, device, type, mhz));
	locked = type == CLOCK_MEM ? &t.gpu->locked_memory : &t.gpu->locked_graphics;
	if (locked->highest && *mhz > locked->highest)
		*mhz = locked->highest;
	if (*mhz < locked->lowest)
		*mhz = locked->lowest;
	if (*mhz > highest_mhz(gpu_model(t.gpu), type))
		*mhz = highest_mhz(gpu_model(t.gpu), type);
	return NVML_SUCCESS;
}

nvmlReturn_t clock_by_id(struct call *call, nvmlDevice_t device, unsigned type, unsigned id, unsigned *mhz)
{
	enum { ID_CURRENT, ID_APP_TARGET, ID_APP_DEFAULT, ID_BOOST_MAX };

	if (id > ID_BOOST_MAX)
		return NVML_ERROR_INVALID_ARGUMENT;
	if (id == ID_CURRENT)
		return clock_info(call, device, type, mhz);
	return id <= ID_APP_TARGET ? clock_application(call, device, type, mhz) : clock_max(call, device, type, mhz);
}

nvmlReturn_t clock_memory_list(struct call *call, nvmlDevice_t device, unsigned *count, unsigned *mhz)
{
	struct target t;

	TRY(resolve_gpu_for(call, device, count, &t));
	if (!mhz || *count < 1) {
		*count = 1;
		return NVML_ERROR_INSUFFICIENT_SIZE;
	}
	*count = 1;
	mhz[0] = gpu_model(t.gpu)->memory_mhz;
	return NVML_SUCCESS;
}

nvmlReturn_t clock_graphics_list(struct call *call, nvmlDevice_t device, unsigned memory_mhz, unsigned *count,
				 unsigned *mhz)
{
	unsigned highest, n;
	struct target t;

	TRY(resolve_gpu_for(call, device, count, &t));
	if (memory_mhz != gpu_model(t.gpu)->memory_mhz)
		return NVML_ERROR_NOT_FOUND;
	highest = gpu_model(t.gpu)->graphics_mhz;
	n = (highest - CLOCK_LOWEST_MHZ) / CLOCK_STEP_MHZ + 1;
	if (!mhz || *count < n) {
		*count = n;
		return NVML_ERROR_INSUFFICIENT_SIZE;
	}
	*count = n;
	for (unsigned i = 0; i < n; i++)
		mhz[i] = highest - i * CLOCK_STEP_MHZ;
	return NVML_SUCCESS;
}

nvmlReturn_t clock_set(struct call *call, nvmlDevice_t device, unsigned memory_mhz, unsigned graphics_mhz)
{
	struct target t;
	struct gpu *gpu;

	TRY(resolve_gpu(call, device, &t));
	TRY(require_root());
	if (memory_mhz != gpu_model(t.gpu)->memory_mhz || graphics_mhz > gpu_model(t.gpu)->graphics_mhz ||
	    graphics_mhz < CLOCK_LOWEST_MHZ)
		return NVML_ERROR_INVALID_ARGUMENT;
	gpu = &call_write(call)->gpus[t.index];
	gpu->app_memory_mhz = memory_mhz;
	gpu->app_graphics_mhz = graphics_mhz;
	return NVML_SUCCESS;
}

nvmlReturn_t clock_reset(struct call *call, nvmlDevice_t device)
{
	struct target t;
	struct gpu *gpu;

	TRY(resolve_gpu(call, device, &t));
	TRY(require_root());
	gpu = &call_write(call)->gpus[t.index];
	gpu->app_memory_mhz = 0;
	gpu->app_graphics_mhz = 0;
	return NVML_SUCCESS;
}

static struct locked *locked(struct body *body, unsigned index, enum clock_type type)
{
	return type == CLOCK_MEM ? &body->gpus[index].locked_memory : &body->gpus[index].locked_graphics;
}

static nvmlReturn_t lock(struct call *call, nvmlDevice_t device, enum clock_type type, unsigned lowest,
			 unsigned highest)
{
	unsigned least, most;
	struct target t;

	TRY(resolve_gpu(call, device, &t));
	TRY(require_root());
	most = type == CLOCK_MEM ? gpu_model(t.gpu)->memory_mhz : gpu_model(t.gpu)->graphics_mhz;
	least = type == CLOCK_MEM ? most : CLOCK_LOWEST_MHZ; /* the memory has one clock */
	if (lowest > highest || highest < least || lowest > most)
		return NVML_ERROR_INVALID_ARGUMENT;
	*locked(call_write(call), t.index, type) = (struct locked){
		.lowest = lowest < least ? least : lowest,
		.highest = highest > most ? most : highest,
	};
	return NVML_SUCCESS;
}

static nvmlReturn_t unlock(struct call *call, nvmlDevice_t device, enum clock_type type)
{
	struct target t;

	TRY(resolve_gpu(call, device, &t));
	TRY(require_root());
	*locked(call_write(call), t.index, type) = (struct locked){0, 0};
	return NVML_SUCCESS;
}

nvmlReturn_t clock_lock_gpu(struct call *call, nvmlDevice_t device, unsigned lowest, unsigned highest)
{
	return lock(call, device, CLOCK_GRAPHICS, lowest, highest);
}

nvmlReturn_t clock_lock_memory(struct call *call, nvmlDevice_t device, unsigned lowest, unsigned highest)
{
	return lock(call, device, CLOCK_MEM, lowest, highest);
}

nvmlReturn_t clock_unlock_gpu(struct call *call, nvmlDevice_t device)
{
	return unlock(call, device, CLOCK_GRAPHICS);
}

nvmlReturn_t clock_unlock_memory(struct call *call, nvmlDevice_t device)
{
	return unlock(call, device, CLOCK_MEM);
}
