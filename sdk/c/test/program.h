/* SPDX-License-Identifier: Apache-2.0
 *
 * What the two programs share: serviceIDs on the command line, and a count of calls.
 */
#ifndef PROGRAM_H
#define PROGRAM_H

#include <errno.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int calls, failed;

/* Counts a call. `good`: what it was to give. */
static long count(const char *what, long result, bool good)
{
	int error = errno;

	calls++;
	if (!good) {
		failed++;
		fprintf(stderr, "%s gave %ld: %s\n", what, result, result < 0 ? strerror(error) : "something else");
	}
	errno = error;
	return result;
}



/* "0011…" with an optional "/bits". */
static struct sockaddr_sv parse(const char *text)
{
	struct sockaddr_sv address = { .sv_family = AF_SERVAL };
	size_t at;

	for (at = 0; at < sizeof(address.sv_srvid.s_sid) && text[2 * at] && text[2 * at] != '/'; at++)
		sscanf(text + 2 * at, "%2hhx", &address.sv_srvid.s_sid[at]);
	if (text[2 * at] == '/')
		address.sv_prefix_bits = (uint8_t)atoi(text + 2 * at + 1);
	return address;
}

static const char *written(const struct sockaddr_sv *address)
{
	static char texts[4][65];
	static unsigned int next;
	char *text = texts[next++ % 4];

	for (size_t at = 0; at < sizeof(address->sv_srvid.s_sid); at++)
		sprintf(text + 2 * at, "%02x", address->sv_srvid.s_sid[at]);
	return text;
}

static bool is_same(const struct sockaddr_sv *one, const struct sockaddr_sv *other)
{
	return one->sv_family == AF_SERVAL && other->sv_family == AF_SERVAL && !memcmp(&one->sv_srvid, &other->sv_srvid, 32);
}

/* The last words of a program; gives its exit status. */
static int report(const char *own, const char *peer)
{
	printf("{\"calls\": %d, \"failed\": %d, \"own\": \"%s\", \"peer\": \"%s\"}\n", calls, failed, own, peer);
	return failed != 0;
}

#endif
