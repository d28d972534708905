/* SPDX-License-Identifier: Apache-2.0
 *
 * The program of a box, which names the boxes that a session goes through next.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <string.h>

#include "internal.h"

/* Reads an address of the kernel's: 0, or -1 with errno. */
static int read_end(const struct sockaddr *given, socklen_t length, struct sockaddr_storage *end)
{
	sa_family_t family;
	socklen_t wanted;

	if (!given || length < sizeof(family))
		return fail(EINVAL, "source and destination of the session's first packet are wanted");
	memcpy(&family, given, sizeof(family));
	if (family != AF_INET && family != AF_INET6)
		return fail(EAFNOSUPPORT, "the first packet of a session has addresses of AF_INET or AF_INET6");
	wanted = family == AF_INET ? sizeof(struct sockaddr_in) : sizeof(struct sockaddr_in6);
	if (length < wanted)
		return fail(EINVAL, "an address of this family has %u bytes", (unsigned int)wanted);
	memset(end, 0, sizeof(*end));
	memcpy(end, given, wanted);
	return 0;
}

int sv_pass_next(const char *boxes, int protocol, const struct sockaddr *from, const struct sockaddr *to,
		 socklen_t length)
{
	struct request request = { .kind = ASK_NEXT, .text = boxes, .fd = -1 };
	struct sockaddr_storage source, destination;
	struct in6_addr address;
	struct reply reply;
	uint16_t port;
	int result;

	forget_error();
	if (protocol != IPPROTO_TCP && protocol != IPPROTO_UDP)
		return fail(EPROTONOSUPPORT, "sessions are of IPPROTO_TCP or IPPROTO_UDP");
	if (!boxes || strlen(boxes) > TEXT_MAX)
		return fail(EINVAL, "the names of boxes have %d bytes at most, with spaces between them", TEXT_MAX);
	if (read_end(from, length, &source) || read_end(to, length, &destination))
		return -1;
	request.protocol = (uint8_t)protocol;
	request.address = address_mapped(&source, &request.port);
	address = address_mapped(&destination, &port);
	memcpy(&request.id.s_sid[0], &address, sizeof(address));
	request.id.s_sid[16] = (uint8_t)(port >> 8);
	request.id.s_sid[17] = (uint8_t)port;
	result = agent_ask(&request, &reply);
	/* It does not know the question. */
	if (result && errno == EBADMSG)
		return fail(EOPNOTSUPP, "the margay agent of this host is of an earlier release, which takes no names of "
			    "next boxes; install a newer one");
	return result;
}
