/* Sensors that are asked for by name and as a field. */
#ifndef SIM_SENSORS_H
#define SIM_SENSORS_H

#include "call.h"

unsigned sensor_celsius(void);
unsigned sensor_milliwatt(const struct gpu *gpu);
unsigned long long sensor_millijoule(const struct call *call, const struct gpu *gpu);

#endif
