/* SPDX-License-Identifier: Apache-2.0
 *
 * ServiceIDs as programs give and get them, and the kernel's addresses that stand for them.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <string.h>

#include "internal.h"

int address_read(const struct sockaddr *given, socklen_t length, struct sockaddr_sv *address)
{
	if (!given || length < sizeof(*address))
		return fail(EINVAL, "an address of AF_SERVAL is a struct sockaddr_sv of %zu bytes", sizeof(*address));
	memcpy(address, given, sizeof(*address));
	if (address->sv_family != AF_SERVAL)
		return fail(EAFNOSUPPORT, "a socket of AF_SERVAL takes addresses of AF_SERVAL alone");
	if (address->sv_flags)
		return fail(EINVAL, "sv_flags is zero");
	return 0;
}

void address_write(const struct sockaddr_sv *address, struct sockaddr *to, socklen_t *length)
{
	if (!to || !length)
		return;
	memcpy(to, address, *length < sizeof(*address) ? *length : sizeof(*address));
	*length = sizeof(*address);
}

struct sockaddr_sv address_of(const struct service_id *id)
{
	struct sockaddr_sv address = { .sv_family = AF_SERVAL };

	address.sv_srvid = *id;
	return address;
}

static struct in6_addr mapped(struct in_addr v4)
{
	struct in6_addr v6 = { 0 };

	v6.s6_addr[10] = v6.s6_addr[11] = 0xff;
	memcpy(&v6.s6_addr[12], &v4, 4);
	return v6;
}

struct in6_addr address_mapped(const struct sockaddr_storage *address, uint16_t *port)
{
	if (address->ss_family == AF_INET) {
		const struct sockaddr_in *v4 = (const struct sockaddr_in *)address;

		*port = ntohs(v4->sin_port);
		return mapped(v4->sin_addr);
	}
	*port = ntohs(((const struct sockaddr_in6 *)address)->sin6_port);
	return ((const struct sockaddr_in6 *)address)->sin6_addr;
}

bool address_equal(const struct sockaddr_storage *one, const struct sockaddr_storage *other)
{
	uint16_t port, other_port;
	struct in6_addr address = address_mapped(one, &port), other_address = address_mapped(other, &other_port);

	return port == other_port && !memcmp(&address, &other_address, sizeof(address));
}

/* Of an agent that says nothing else: 198.18.0.1 and fd5a:4c00::1. */
#define USUAL_V4 0xc6120001
#define USUAL_V6 { { { 0xfd, 0x5a, 0x4c, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1 } } }
#define RANGE_V4 0xfffe0000

/* What an agent has said, and on which connection. Under the lock of the state. */
static struct own_ends said;
static unsigned int said_on;

/* False: nobody says it now. */
static bool ask_ends(struct own_ends *ends)
{
	struct request request = { .kind = ASK_RANGES, .fd = -1 };
	int error = errno;
	bool is_told;
	struct reply reply = { 0 };

	/* An agent that does not know the question refuses it. */
	is_told = !agent_ask(&request, &reply) || errno == EBADMSG;
	if (is_told && reply.v4.s_addr)
		*ends = (struct own_ends){ .v4 = reply.v4, .v6 = reply.v6 };
	forget_error();
	errno = error;
	return is_told;
}

struct own_ends address_own(void)
{
	struct own_ends ends = { .v4 = { htonl(USUAL_V4) }, .v6 = USUAL_V6 };
	struct section section;
	bool is_known;

	section_enter(&section, &state_lock);
	is_known = said_on && said_on == agent_connection();
	if (said_on)
		ends = said;
	section_leave(&section, &state_lock);
	if (!is_known && ask_ends(&ends)) {
		section_enter(&section, &state_lock);
		said = ends;
		said_on = agent_connection();
		section_leave(&section, &state_lock);
	}
	return ends;
}

bool address_is_virtual(const struct sockaddr_storage *address)
{
	struct own_ends ends = address_own();
	uint16_t port;
	struct in6_addr found = address_mapped(address, &port);
	uint32_t v4;

	if (!IN6_IS_ADDR_V4MAPPED(&found))
		return !memcmp(&found, &ends.v6, 4);
	memcpy(&v4, &found.s6_addr[12], sizeof(v4));
	return !((v4 ^ ends.v4.s_addr) & htonl(RANGE_V4));
}

time_t address_now(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return now.tv_sec;
}

static struct known v6_choice(const struct service_id *id, struct in6_addr address, uint16_t port)
{
	struct known known = { .id = *id, .length = sizeof(struct sockaddr_in6) };
	struct sockaddr_in6 v6 = { .sin6_family = AF_INET6, .sin6_port = htons(port), .sin6_addr = address };

	memcpy(&known.address, &v6, sizeof(v6));
	return known;
}

static struct known v4_choice(const struct service_id *id, struct in_addr address, uint16_t port)
{
	struct known known = { .id = *id, .length = sizeof(struct sockaddr_in) };
	struct sockaddr_in v4 = { .sin_family = AF_INET, .sin_port = htons(port), .sin_addr = address };

	memcpy(&known.address, &v4, sizeof(v4));
	return known;
}

int address_resolve(const struct sock *sock, const struct sockaddr_sv *name, struct known choices[2])
{
	char text[TEXT_MAX + 1];
	struct request request = {
		.kind = ASK_RESOLVE, .protocol = sock_protocol(sock), .bits = bits_of(name), .id = name->sv_srvid, .fd = -1
	};
	struct reply reply;

	name_find(&name->sv_srvid, request.bits, text);
	request.text = request.bits == SERVICE_ID_BITS ? text : NULL;
	if (agent_ask(&request, &reply))
		return -1;
	memset(choices, 0, 2 * sizeof(choices[0]));
	if (sock->family == AF_INET) {
		if (!reply.v4.s_addr)
			return fail(EADDRNOTAVAIL, "the name has no IPv4 address here, and this host has no IPv6");
		choices[0] = v4_choice(&name->sv_srvid, reply.v4, reply.port);
		return 0;
	}
	choices[0] = v6_choice(&name->sv_srvid, reply.v6, reply.port);
	if (reply.v4.s_addr && !IN6_IS_ADDR_V4MAPPED(&reply.v6))
		choices[1] = v6_choice(&name->sv_srvid, mapped(reply.v4), reply.port);
	return 0;
}
