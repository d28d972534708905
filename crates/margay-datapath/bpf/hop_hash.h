/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0
 *
 * The hash of what a hop tag covers.
 */
#pragma once

#include "sip_hash.h"

#define HOP_TAGGED_LEN 100

/* Of the bytes from `message` on, HOP_TAGGED_LEN of which the caller has checked. A processor that must have words
 * aligned is not one that eBPF's verifier lets read packets like this.
 */
static __always_inline __u64 hop_hash(__u64 key0, __u64 key1, const void *message)
{
	const word64 *words = message;
	__u64 last = (__u64)HOP_TAGGED_LEN << 56 | *(const word32 *)(message + 96);

	sip_start(key0, key1);
	_Pragma("unroll") for (int at = 0; at < 12; at++)
	{
		__u64 word = words[at];

		sip_word(word);
	}
	sip_word(last);
	sip_end();
	return v0 ^ v1 ^ v2 ^ v3;
}
