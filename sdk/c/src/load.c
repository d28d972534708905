/* SPDX-License-Identifier: Apache-2.0
 *
 * How loaded this process is, for the agent, which scales the weight of what the process serves.
 */
#define _GNU_SOURCE
#include <errno.h>

#include "internal.h"

int sv_report_load(const struct sockaddr *name, socklen_t length, unsigned int percent)
{
	struct request request = { .kind = ASK_LOAD, .fd = -1 };
	struct sockaddr_sv address;
	struct reply reply;
	int result;

	forget_error();
	if (address_read(name, length, &address))
		return -1;
	if (percent > SV_LOAD_MAX_PERCENT)
		return fail(EINVAL, "%u %% of a weight cannot stay: 0 to %d can", percent, SV_LOAD_MAX_PERCENT);
	request.port = (uint16_t)percent;
	request.id = address.sv_srvid;
	request.bits = bits_of(&address);
	result = agent_report(&request, &reply);
	/* It does not know the question. */
	if (result && errno == EBADMSG)
		return fail(EOPNOTSUPP, "the margay agent of this host is of an earlier release, which takes no reports of "
			    "load; install a newer one");
	return result;
}
