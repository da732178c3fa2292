/* The part of NVML's binary interface that the simulated driver serves.
 *
 * Names, numbers and struct layouts are those that clients of the real
 * libnvidia-ml.so.1 (nvidia-ml-py, Slurm's gpu/nvml plugin) are built for.
 */
#ifndef SIM_ABI_H
#define SIM_ABI_H

#include <stddef.h>
#include <stdint.h>

#define EXPORT __attribute__((visibility("default")))

typedef enum {
	NVML_SUCCESS = 0,
	NVML_ERROR_UNINITIALIZED = 1,
	NVML_ERROR_INVALID_ARGUMENT = 2,
	NVML_ERROR_NOT_SUPPORTED = 3,
	NVML_ERROR_NO_PERMISSION = 4,
	NVML_ERROR_NOT_FOUND = 6,
	NVML_ERROR_INSUFFICIENT_SIZE = 7,
	NVML_ERROR_DRIVER_NOT_LOADED = 9,
	NVML_ERROR_TIMEOUT = 10,
	NVML_ERROR_GPU_IS_LOST = 15,
	NVML_ERROR_RESET_REQUIRED = 16,
	NVML_ERROR_IN_USE = 19,
	NVML_ERROR_MEMORY = 20,
	NVML_ERROR_INSUFFICIENT_RESOURCES = 23,
	NVML_ERROR_ARGUMENT_VERSION_MISMATCH = 25,
	NVML_ERROR_UNKNOWN = 999,
} nvmlReturn_t;

/* Opaque: the value is an encoded name (session.h), it points at nothing. */
typedef struct sim_opaque *nvmlDevice_t;
typedef struct sim_opaque *nvmlGpuInstance_t;
typedef struct sim_opaque *nvmlComputeInstance_t;

#define NVML_VERSION_WORD(type, version) ((unsigned)(sizeof(type) | ((unsigned)(version) << 24)))

#define NVML_GPU_INSTANCE_PROFILE_COUNT 0x11
#define NVML_COMPUTE_INSTANCE_PROFILE_COUNT 9
#define NVML_COMPUTE_INSTANCE_ENGINE_PROFILE_COUNT 1

#define NVML_GPU_INSTANCE_PROFILE_CAPS_P2P 0x1
#define NVML_GPU_INSTANCE_PROFILE_CAPS_GFX 0x2
#define NVML_COMPUTE_INSTANCE_PROFILE_CAPS_GFX 0x1

#define NVML_DEVICE_ARCH_AMPERE 7
#define NVML_DEVICE_ARCH_HOPPER 9
#define NVML_DEVICE_ARCH_BLACKWELL 10

#define NVML_NO_INSTANCE 0xFFFFFFFFu

#define NVML_MEMORY_ERROR_TYPE_CORRECTED 0
#define NVML_MEMORY_ERROR_TYPE_UNCORRECTED 1
#define NVML_VOLATILE_ECC 0
#define NVML_AGGREGATE_ECC 1
#define NVML_MEMORY_LOCATION_DRAM 2
#define NVML_MEMORY_LOCATION_SRAM 7
#define NVML_MEMORY_LOCATION_COUNT 8

#define NVML_EVENT_XID 0x8ull

#define NVML_GPM_METRICS_GET_VERSION 1
#define NVML_GPM_SUPPORT_VERSION 1

typedef struct {
	unsigned start;
	unsigned size;
} nvmlPlacement_t;

typedef struct {
	unsigned id, isP2pSupported, sliceCount, instanceCount, multiprocessorCount, copyEngineCount;
	unsigned decoderCount, encoderCount, jpegCount, ofaCount;
	unsigned long long memorySizeMB;
} nvmlGpuInstanceProfileInfo_v1_t;

typedef struct {
	unsigned version, id, isP2pSupported, sliceCount, instanceCount, multiprocessorCount, copyEngineCount;
	unsigned decoderCount, encoderCount, jpegCount, ofaCount;
	unsigned long long memorySizeMB;
	char name[96];
} nvmlGpuInstanceProfileInfo_v2_t;

typedef struct {
	unsigned version, id, sliceCount, instanceCount, multiprocessorCount, copyEngineCount;
	unsigned decoderCount, encoderCount, jpegCount, ofaCount;
	unsigned long long memorySizeMB;
	char name[96];
	unsigned capabilities;
} nvmlGpuInstanceProfileInfo_v3_t;

typedef struct {
	nvmlDevice_t device;
	unsigned id, profileId;
	nvmlPlacement_t placement;
} nvmlGpuInstanceInfo_t;

typedef struct {
	unsigned id, sliceCount, instanceCount, multiprocessorCount;
	unsigned sharedCopyEngineCount, sharedDecoderCount, sharedEncoderCount, sharedJpegCount, sharedOfaCount;
} nvmlComputeInstanceProfileInfo_v1_t;

typedef struct {
	unsigned version, id, sliceCount, instanceCount, multiprocessorCount;
	unsigned sharedCopyEngineCount, sharedDecoderCount, sharedEncoderCount, sharedJpegCount, sharedOfaCount;
	char name[96];
} nvmlComputeInstanceProfileInfo_v2_t;

typedef struct {
	unsigned version, id, sliceCount, instanceCount, multiprocessorCount;
	unsigned sharedCopyEngineCount, sharedDecoderCount, sharedEncoderCount, sharedJpegCount, sharedOfaCount;
	char name[96];
	unsigned capabilities;
} nvmlComputeInstanceProfileInfo_v3_t;

typedef struct {
	nvmlDevice_t device;
	nvmlGpuInstance_t gpuInstance;
	unsigned id, profileId;
	nvmlPlacement_t placement;
} nvmlComputeInstanceInfo_t;

/* What nvmlComputeInstanceGetInfo wrote before _v2. */
typedef struct {
	nvmlDevice_t device;
	nvmlGpuInstance_t gpuInstance;
	unsigned id, profileId;
} nvmlComputeInstanceInfo_v1_t;

typedef struct {
	unsigned multiprocessorCount;
	unsigned sharedCopyEngineCount, sharedDecoderCount, sharedEncoderCount, sharedJpegCount, sharedOfaCount;
	unsigned gpuInstanceSliceCount, computeInstanceSliceCount;
	unsigned long long memorySizeMB;
} nvmlDeviceAttributes_t;

typedef struct {
	unsigned long long total, free, used;
} nvmlMemory_t;

typedef struct {
	unsigned version;
	unsigned long long total, reserved, free, used;
} nvmlMemory_v2_t;

typedef struct {
	unsigned long long bar1Total, bar1Free, bar1Used;
} nvmlBAR1Memory_t;

typedef struct {
	unsigned pid;
	unsigned long long usedGpuMemory;
} nvmlProcessInfo_v1_t;

typedef struct {
	unsigned pid;
	unsigned long long usedGpuMemory;
	unsigned gpuInstanceId, computeInstanceId;
} nvmlProcessInfo_v2_t;

typedef struct {
	unsigned pid;
	unsigned long long timeStamp;
	unsigned smUtil, memUtil, encUtil, decUtil;
} nvmlProcessUtilizationSample_t;

typedef struct {
	char busIdLegacy[16];
	unsigned domain, bus, device, pciDeviceId, pciSubSystemId;
	char busId[32];
} nvmlPciInfo_t;

/* What nvmlDeviceGetPciInfo_v2 and older write: the bus id's longer form came later. */
typedef struct {
	char busId[16];
	unsigned domain, bus, device, pciDeviceId, pciSubSystemId, reserved[4];
} nvmlPciInfo_v2_t;

typedef struct {
	unsigned gpu, memory;
} nvmlUtilization_t;

typedef struct {
	unsigned version, sensorType;
	int temperature;
} nvmlTemperature_v1_t;

typedef struct {
	unsigned pid;
	unsigned long long usedGpuMemory;
	unsigned gpuInstanceId, computeInstanceId;
	unsigned long long usedGpuCcProtectedMemory;
} nvmlProcessDetail_v1_t;

typedef struct {
	unsigned version, mode, numProcArrayEntries;
	nvmlProcessDetail_v1_t *procArray;
} nvmlProcessDetailList_v1_t;

typedef struct {
	unsigned long long protectedMemSizeKib, unprotectedMemSizeKib;
} nvmlConfComputeMemSizeInfo_t;

enum nvml_value_type {
	NVML_VALUE_TYPE_UNSIGNED_INT = 1,
	NVML_VALUE_TYPE_UNSIGNED_LONG_LONG = 3,
};

typedef union {
	double dVal;
	unsigned uiVal;
	unsigned long ulVal;
	unsigned long long ullVal;
	long long sllVal;
} nvmlValue_t;

typedef struct {
	unsigned fieldId, scopeId;
	long long timestamp, latencyUsec; /* us */
	unsigned valueType;		  /* enum nvml_value_type */
	nvmlReturn_t nvmlReturn;
	nvmlValue_t value;
} nvmlFieldValue_t;

typedef struct {
	nvmlDevice_t device;
	unsigned long long eventType, eventData;
} nvmlEventData_v1_t;

typedef struct {
	nvmlDevice_t device;
	unsigned long long eventType, eventData;
	unsigned gpuInstanceId, computeInstanceId;
} nvmlEventData_v2_t;

typedef struct event_set *nvmlEventSet_t;
typedef struct gpm_sample *nvmlGpmSample_t;

typedef struct {
	unsigned version, isSupportedDevice;
} nvmlGpmSupport_t;

typedef struct {
	unsigned metricId;
	nvmlReturn_t nvmlReturn;
	double value;
	struct {
		const char *shortName, *longName, *unit;
	} metricInfo;
} nvmlGpmMetric_t;

/* The array's length is NVML_GPM_METRIC_MAX of the caller's header, which grows; numMetrics are there. */
typedef struct {
	unsigned version, numMetrics;
	nvmlGpmSample_t sample1, sample2;
	nvmlGpmMetric_t metrics[];
} nvmlGpmMetricsGet_t;

_Static_assert(sizeof(nvmlProcessDetail_v1_t) == 32, "layout");
_Static_assert(sizeof(nvmlProcessDetailList_v1_t) == 24, "layout");
_Static_assert(sizeof(nvmlFieldValue_t) == 40, "layout");
_Static_assert(sizeof(nvmlEventData_v2_t) == 32, "layout");
_Static_assert(sizeof(nvmlGpmMetric_t) == 40, "layout");
_Static_assert(offsetof(nvmlGpmMetricsGet_t, metrics) == 24, "layout");
_Static_assert(sizeof(nvmlGpuInstanceProfileInfo_v1_t) == 48, "layout");
_Static_assert(sizeof(nvmlGpuInstanceProfileInfo_v2_t) == 152, "layout");
_Static_assert(sizeof(nvmlGpuInstanceProfileInfo_v3_t) == 152, "layout");
_Static_assert(sizeof(nvmlGpuInstanceInfo_t) == 24, "layout");
_Static_assert(sizeof(nvmlComputeInstanceProfileInfo_v1_t) == 36, "layout");
_Static_assert(sizeof(nvmlComputeInstanceProfileInfo_v2_t) == 136, "layout");
_Static_assert(sizeof(nvmlComputeInstanceInfo_t) == 32, "layout");
_Static_assert(sizeof(nvmlDeviceAttributes_t) == 40, "layout");
_Static_assert(sizeof(nvmlProcessInfo_v2_t) == 24, "layout");
_Static_assert(sizeof(nvmlPciInfo_t) == 68, "layout");
_Static_assert(sizeof(nvmlPciInfo_v2_t) == 52, "layout");
_Static_assert(sizeof(nvmlComputeInstanceInfo_v1_t) == 24, "layout");

#endif
