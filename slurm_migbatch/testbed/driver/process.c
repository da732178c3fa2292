/* Liveness of registered processes. */
#include "process.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

uint64_t process_start_time(int32_t pid, bool *alive)
{
	char path[64], text[1024], *field;
	ssize_t n;
	int fd;

	*alive = kill(pid, 0) == 0 || errno != ESRCH;
	if (!*alive)
		return 0;
	snprintf(path, sizeof(path), "/proc/%d/stat", pid);
	fd = open(path, O_RDONLY | O_CLOEXEC);
	if (fd < 0)
		return 0; /* no /proc here (a bare chroot): existence is all there is */
	n = read(fd, text, sizeof(text) - 1);
	close(fd);
	if (n <= 0)
		return 0;
	text[n] = '\0';
	field = strrchr(text, ')'); /* the name may hold spaces and brackets */
	if (!field || strlen(field) < 4)
		return 0;
	if (field[2] == 'Z' || field[2] == 'X') {
		*alive = false;
		return 0;
	}
	field += 2;
	for (int i = 3; i < 22 && field; i++) /* from field 3, the state, to field 22 */
		field = strchr(field + 1, ' ');
	return field ? strtoull(field, NULL, 10) : 0;
}

bool process_holds(const struct process *process)
{
	uint64_t start;
	bool alive;

	if (!process->pid)
		return false;
	if (process->sticky)
		return true;
	start = process_start_time(process->pid, &alive);
	/* another process may have taken the number */
	return alive && (!start || !process->start_time || start == process->start_time);
}

bool process_on_ci(const struct body *body, const struct ci *ci)
{
	for (unsigned i = 0; i < MAX_PROCESSES; i++)
		if (body->processes[i].pid && body->processes[i].ci_serial == ci->serial &&
		    process_holds(&body->processes[i]))
			return true;
	return false;
}

bool process_on_gpu(const struct body *body, unsigned gpu)
{
	for (unsigned i = 0; i < MAX_PROCESSES; i++)
		if (body->processes[i].pid && body->processes[i].gpu == gpu && process_holds(&body->processes[i]))
			return true;
	return false;
}

void process_sweep(struct body *body)
{
	for (unsigned i = 0; i < MAX_PROCESSES; i++)
		if (body->processes[i].pid && !process_holds(&body->processes[i]))
			memset(&body->processes[i], 0, sizeof(body->processes[i]));
}

uint64_t process_memory_gi(const struct body *body, const struct gi *gi)
{
	uint64_t sum = 0;

	for (unsigned i = 0; i < MAX_PROCESSES; i++)
		for (unsigned j = 0; j < MAX_CIS && body->processes[i].pid; j++)
			if (gi->ci[j].serial && body->processes[i].ci_serial == gi->ci[j].serial &&
			    process_holds(&body->processes[i]))
				sum += body->processes[i].memory_mib;
	return sum;
}

uint64_t process_memory_gpu(const struct body *body, unsigned gpu)
{
	uint64_t sum = 0;

	for (unsigned i = 0; i < MAX_PROCESSES; i++)
		if (body->processes[i].pid && body->processes[i].gpu == gpu && process_holds(&body->processes[i]))
			sum += body->processes[i].memory_mib;
	return sum;
}
