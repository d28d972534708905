/* SPDX-License-Identifier: Apache-2.0
 *
 * A program that leaves between two connections: they become one.
 */
#define _GNU_SOURCE
#include <errno.h>

#include "internal.h"

static void close_socket(int fd)
{
	int error = errno;

	sock_remove(fd);
	REAL(close)(fd);
	errno = error;
}

int sv_splice(int left, int right)
{
	bool is_unknown;
	int result;

	forget_error();
	/* A negative one would just not be sent. */
	if (left < 0 || right < 0)
		return fail(EBADF, "the descriptor is not open");
	result = agent_splice(left, right, SPLICE_AGENT_RELAYS, &is_unknown);
	if (!result || is_unknown) {
		close_socket(left);
		close_socket(right);
	}
	if (result && is_unknown)
		return fail(ECONNABORTED,
			    "the margay agent has not said whether it relays between the two connections, so that they "
			    "are closed here; see the agent's log");
	return result;
}
