/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0
 *
 * SipHash-2-4 (Aumasson, Bernstein: "SipHash: a fast short-input PRF", 2012) of the bytes that a hop tag covers, without a loop.
 */
#pragma once

#define HOP_TAGGED_LEN 100

#define rotate(value, by) ((value) << (by) | (value) >> (64 - (by)))

#define sip_round()                        \
	do {                               \
		v0 += v1;                  \
		v1 = rotate(v1, 13) ^ v0;  \
		v0 = rotate(v0, 32);       \
		v2 += v3;                  \
		v3 = rotate(v3, 16) ^ v2;  \
		v0 += v3;                  \
		v3 = rotate(v3, 21) ^ v0;  \
		v2 += v1;                  \
		v1 = rotate(v1, 17) ^ v2;  \
		v2 = rotate(v2, 32);       \
	} while (0)

#define sip_word(word)      \
	do {                \
		v3 ^= word; \
		sip_round();\
		sip_round();\
		v0 ^= word; \
	} while (0)

/* Of the bytes from `message` on, HOP_TAGGED_LEN of which the caller has checked. A processor that must have words aligned is not
 * one that eBPF's verifier lets read packets like this.
 */
static __always_inline __u64 sip_hash(__u64 key0, __u64 key1, const void *message)
{
	const word64 *words = message;
	__u64 v0 = key0 ^ 0x736f6d6570736575ULL;
	__u64 v1 = key1 ^ 0x646f72616e646f6dULL;
	__u64 v2 = key0 ^ 0x6c7967656e657261ULL;
	__u64 v3 = key1 ^ 0x7465646279746573ULL;
	__u64 last = (__u64)HOP_TAGGED_LEN << 56 | *(const word32 *)(message + 96);

	_Pragma("unroll") for (int at = 0; at < 12; at++)
	{
		__u64 word = words[at];

		sip_word(word);
	}
	sip_word(last);
	v2 ^= 0xff;
	sip_round();
	sip_round();
	sip_round();
	sip_round();
	return v0 ^ v1 ^ v2 ^ v3;
}
