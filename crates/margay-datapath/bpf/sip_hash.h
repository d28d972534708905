/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0
 *
 * SipHash-2-4 (Aumasson, Bernstein: "SipHash: a fast short-input PRF", 2012), without a loop.
 */
#pragma once

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

#define sip_start(key0, key1)                      \
	__u64 v0 = (key0) ^ 0x736f6d6570736575ULL; \
	__u64 v1 = (key1) ^ 0x646f72616e646f6dULL; \
	__u64 v2 = (key0) ^ 0x6c7967656e657261ULL; \
	__u64 v3 = (key1) ^ 0x7465646279746573ULL

#define sip_end()    \
	do {         \
		v2 ^= 0xff;\
		sip_round();\
		sip_round();\
		sip_round();\
		sip_round();\
	} while (0)
