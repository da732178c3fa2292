/* The process' connection to its machine, from nvmlInit to nvmlShutdown. */
#ifndef SIM_SESSION_H
#define SIM_SESSION_H

#include "state.h"

/* The attached machine with the process lock held, or NULL before nvmlInit. */
struct machine *session_enter(void);
void session_leave(void);
/* False for a session from before the last reboot: it needs a new nvmlInit. */
bool session_current(const struct body *body);

#endif
