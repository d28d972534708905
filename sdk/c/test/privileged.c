/* SPDX-License-Identifier: Apache-2.0
 *
 * A program that has more rights than who starts it: what the environment says of agents does not count.
 */
#define _GNU_SOURCE
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "margay.h"

int main(void)
{
	struct sockaddr_sv name;
	bool is_trusted = secure_getenv("MARGAY_PROGRAMS");

	/* No agent is at the path that the test names; at the usual one may be one. */
	if (!sv_name("web.shop", &name))
		return is_trusted;
	printf("%s: %s\n", is_trusted ? "trusted" : "privileged", sv_strerror());
	return (strstr(sv_strerror(), getenv("MARGAY_PROGRAMS")) != NULL) != is_trusted;
}
