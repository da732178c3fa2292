/* The exported entry points: each runs its implementation inside a call. */
#include "abi.h"
#include "api.h"

#define FN(name, implementation, access, parameters, ...)                   \
	EXPORT nvmlReturn_t name parameters;                                \
	EXPORT nvmlReturn_t name parameters                                 \
	{                                                                   \
		struct call call;                                           \
		nvmlReturn_t result = call_enter(&call, FN_##name, access); \
                                                                            \
		if (result == NVML_SUCCESS)                                 \
			result = implementation(&call, __VA_ARGS__);        \
		return call_leave(&call, result);                           \
	}
#include "entry_points.h"
#undef FN

EXPORT const char *nvmlErrorString(nvmlReturn_t result);

EXPORT const char *nvmlErrorString(nvmlReturn_t result)
{
	switch ((int)result) {
	case 0: return "Success";
	case 1: return "Uninitialized";
	case 2: return "Invalid Argument";
	case 3: return "Not Supported";
	case 4: return "Insufficient Permissions";
	case 5: return "Already Initialized";
	case 6: return "Not Found";
	case 7: return "Insufficient Size";
	case 8: return "Insufficient External Power";
	case 9: return "Driver Not Loaded";
	case 10: return "Timeout";
	case 11: return "Interrupt Request Issue";
	case 12: return "NVML Shared Library Not Found";
	case 13: return "Function Not Found";
	case 14: return "Corrupted infoROM";
	case 15: return "GPU is lost";
	case 16: return "GPU requires reset";
	case 17: return "The operating system has blocked the request";
	case 18: return "RM has detected an NVML/RM version mismatch";
	case 19: return "In use by another client";
	case 20: return "Insufficient Memory";
	case 21: return "No data";
	case 22: return "vGPU ECC Not Supported";
	case 23: return "Insufficient Resources";
	case 24: return "Frequency Not Supported";
	case 25: return "Argument version mismatch";
	case 26: return "Deprecated";
	case 27: return "Not Ready";
	case 28: return "GPU Not Found";
	case 29: return "Invalid State";
	case 30: return "Reset Type Not Supported";
	default: return "Unknown Error";
	}
}
