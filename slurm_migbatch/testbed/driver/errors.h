/* Memory error counters, for those who ask for one and for those who ask for a field. */
#ifndef SIM_ERRORS_H
#define SIM_ERRORS_H

#include "call.h"

/* NVML_MEMORY_LOCATION_COUNT as location stands for all of them. */
nvmlReturn_t errors_count(const struct target *t, unsigned type, unsigned counter, unsigned location,
			  unsigned long long *count);

#endif
