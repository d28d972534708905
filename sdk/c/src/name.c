/* SPDX-License-Identifier: Apache-2.0
 *
 * Written names. An address has no room for one: those that were looked up are remembered, so that lists show them.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "internal.h"

#define NAMES_MAX 64

struct written {
	struct service_id id;
	uint16_t bits;
	char text[TEXT_MAX + 1];
};

static struct written names[NAMES_MAX];
static unsigned int next_name;

static struct written *look_up(const struct service_id *id, uint16_t bits)
{
	for (unsigned int at = 0; at < NAMES_MAX; at++) {
		struct written *name = &names[at];

		if (name->text[0] && name->bits == bits && !memcmp(&name->id, id, sizeof(*id)))
			return name;
	}
	return NULL;
}

static void remember(const struct reply *reply)
{
	struct section section;
	struct written *name;

	section_enter(&section, &state_lock);
	name = look_up(&reply->id, reply->bits);
	if (!name)
		name = &names[next_name++ % NAMES_MAX];
	name->id = reply->id;
	name->bits = reply->bits;
	memcpy(name->text, reply->text, sizeof(name->text));
	section_leave(&section, &state_lock);
}

void name_find(const struct service_id *id, uint16_t bits, char text[TEXT_MAX + 1])
{
	struct section section;
	const struct written *name;

	section_enter(&section, &state_lock);
	name = look_up(id, bits);
	strcpy(text, name ? name->text : "");
	section_leave(&section, &state_lock);
}

int sv_name(const char *written, struct sockaddr_sv *address)
{
	struct request request = { .kind = ASK_NAME, .text = written, .fd = -1 };
	struct reply reply;

	forget_error();
	if (!written || strlen(written) > TEXT_MAX)
		return fail(EINVAL, "a name has 1 to 200 bytes");
	if (agent_ask(&request, &reply))
		return -1;
	if (!reply.bits)
		return fail(EINVAL, "%s is every name there is, which an address cannot say", written);
	remember(&reply);
	memset(address, 0, sizeof(*address));
	address->sv_family = AF_SERVAL;
	address->sv_prefix_bits = (uint8_t)(reply.bits % SERVICE_ID_BITS);
	address->sv_srvid = reply.id;
	return 0;
}

const char *sv_ntop(const struct sockaddr_sv *address, char *text, size_t size)
{
	char found[TEXT_MAX + 1];
	uint16_t bits = bits_of(address);

	name_find(&address->sv_srvid, bits, found);
	if (!found[0]) {
		int at = sprintf(found, "sid:");

		for (unsigned int byte = 0; byte < sizeof(address->sv_srvid.s_sid); byte++)
			at += sprintf(found + at, "%02x", address->sv_srvid.s_sid[byte]);
		if (bits < SERVICE_ID_BITS)
			sprintf(found + at, "/%u", bits);
	}
	if (strlen(found) >= size) {
		fail(ENOSPC, "a text of %zu bytes is wanted", strlen(found) + 1);
		return NULL;
	}
	return strcpy(text, found);
}
