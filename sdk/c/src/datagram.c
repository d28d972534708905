/* SPDX-License-Identifier: Apache-2.0
 *
 * Data. What has no address in it is the kernel's own; datagrams to names, and from them, are looked up once and
 * remembered.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "internal.h"

/* A name that was found for an address holds so long: another client may have it later. */
#define ASKER_S 1
/* An address that was found for a name: whoever goes on using it keeps it. */
#define TARGET_S 60

ssize_t sv_send(int fd, const void *data, size_t length, int flags)
{
	struct sock *sock = frames_get(fd);
	ssize_t result;

	forget_error();
	if (sock) {
		result = frames_send(fd, sock, data, length, flags);
		sock_put(sock);
		return result;
	}
	return REAL(sendto)(fd, data, length, flags, NULL, 0);
}

ssize_t sv_recv(int fd, void *data, size_t length, int flags)
{
	struct sock *sock = frames_get(fd);
	ssize_t result;
	bool is_cut;

	forget_error();
	if (sock) {
		result = frames_receive(fd, sock, data, length, flags, &is_cut);
		sock_put(sock);
		return result;
	}
	return REAL(recvfrom)(fd, data, length, flags, NULL, NULL);
}

static void cache_put(struct cache **cache, const struct known *known)
{
	struct section section;

	section_enter(&section, &state_lock);
	if (!*cache)
		*cache = calloc(1, sizeof(**cache));
	/* Without memory it is asked for again. */
	if (*cache)
		(*cache)->entries[(*cache)->next++ % CACHE_MAX] = *known;
	section_leave(&section, &state_lock);
}

/* `now`: what has gone stale since does not count; 0: all does. The newest comes first. */
static bool cache_by_id(struct cache *const *cache, const struct service_id *id, time_t now, struct known *found)
{
	struct section section;
	bool is_there = false;

	section_enter(&section, &state_lock);
	for (unsigned int at = 0; *cache && at < CACHE_MAX && !is_there; at++) {
		const struct known *entry = &(*cache)->entries[((*cache)->next - 1 - at) % CACHE_MAX];

		is_there = entry->length && entry->until >= now && !memcmp(&entry->id, id, sizeof(*id));
		if (is_there)
			*found = *entry;
	}
	section_leave(&section, &state_lock);
	return is_there;
}

static bool cache_by_address(struct cache *const *cache, const struct sockaddr_storage *address, struct service_id *id)
{
	time_t now = address_now();
	struct section section;
	bool is_there = false;

	section_enter(&section, &state_lock);
	for (unsigned int at = 0; *cache && at < CACHE_MAX && !is_there; at++) {
		const struct known *entry = &(*cache)->entries[at];

		is_there = entry->length && entry->until >= now && address_equal(&entry->address, address);
		if (is_there)
			*id = entry->id;
	}
	section_leave(&section, &state_lock);
	return is_there;
}

/* Where a datagram to a name goes. */
static int find_target(int fd, struct sock *sock, const struct sockaddr *given, socklen_t length, struct known *target)
{
	struct sockaddr_sv address;
	struct known choices[2];

	if (address_read(given, length, &address))
		return -1;
	if (cache_by_id(&sock->targets, &address.sv_srvid, address_now(), target))
		return 0;
	/* In this order: the question finds out whether the agent is another than before. */
	if (address_resolve(sock, &address, choices) || socket_ensure_name(fd, sock))
		return -1;
	*target = choices[0];
	target->until = address_now() + TARGET_S;
	cache_put(&sock->targets, target);
	return 0;
}

/* Who sent a datagram; where nobody knows any more, a name that is all zero. False: it came by an address of the
 * network, and is for nobody here.
 */
static bool find_asker(int fd, struct sock *sock, const struct sockaddr_storage *from, struct sockaddr_sv *name)
{
	struct known asker = { .address = *from, .length = sizeof(*from), .until = address_now() + ASKER_S };
	bool came_by_name = true;

	if (!cache_by_address(&sock->targets, from, &asker.id) && !cache_by_address(&sock->askers, from, &asker.id)) {
		if (!socket_peer(fd, sock, from, &asker.id))
			cache_put(&sock->askers, &asker);
		else
			came_by_name = errno != ENOTCONN || address_is_virtual(from);
		forget_error();
	}
	*name = address_of(&asker.id);
	return came_by_name;
}

/* An answer to whom asked goes the way back; a name that nobody here was asked by is looked up. */
static int choose_way(int fd, struct sock *sock, const struct sockaddr *given, socklen_t length, struct known *way)
{
	struct sockaddr_sv address;

	if (!address_read(given, length, &address) && cache_by_id(&sock->askers, &address.sv_srvid, 0, way)) {
		forget_error();
		way->length = sock->family == AF_INET ? sizeof(struct sockaddr_in) : sizeof(struct sockaddr_in6);
		return 0;
	}
	return find_target(fd, sock, given, length, way);
}

ssize_t sv_sendto(int fd, const void *data, size_t length, int flags, const struct sockaddr *address, socklen_t size)
{
	struct sock *sock = address ? sock_get(fd) : NULL;
	struct known way;
	ssize_t result;

	/* Without an address it is send; with one, to the peer: nobody else can be meant. */
	if (!address || (sock && sock->type == SOCK_SEQPACKET)) {
		if (sock)
			sock_put(sock);
		return sv_send(fd, data, length, flags);
	}
	forget_error();
	if (!sock)
		return REAL(sendto)(fd, data, length, flags, address, size);
	if (sock->type == SOCK_STREAM)
		result = REAL(sendto)(fd, data, length, flags, NULL, 0);
	else if (choose_way(fd, sock, address, size, &way))
		result = -1;
	else
		result = REAL(sendto)(fd, data, length, flags, (const struct sockaddr *)&way.address, way.length);
	sock_put(sock);
	return result;
}

ssize_t sv_recvfrom(int fd, void *data, size_t length, int flags, struct sockaddr *address, socklen_t *size)
{
	struct sock *sock = address && size && !(flags & MSG_ERRQUEUE) ? sock_get(fd) : NULL;
	struct sockaddr_storage from;
	socklen_t from_size;
	struct sockaddr_sv asker;
	ssize_t got;

	if (sock && sock->type == SOCK_SEQPACKET) {
		sock_put(sock);
		*size = 0;
		return sv_recv(fd, data, length, flags);
	}
	if (!sock && !address)
		return sv_recv(fd, data, length, flags);
	forget_error();
	if (!sock)
		return REAL(recvfrom)(fd, data, length, flags, address, size);
	do {
		from_size = sizeof(from);
		got = REAL(recvfrom)(fd, data, length, flags, (struct sockaddr *)&from, &from_size);
	} while (got >= 0 && from_size && !find_asker(fd, sock, &from, &asker));
	if (got >= 0 && from_size) {
		address_write(&asker, address, size);
	} else if (got >= 0) {
		/* A stream: nobody but the peer. */
		*size = 0;
	}
	sock_put(sock);
	return got;
}

ssize_t sv_sendmsg(int fd, const struct msghdr *message, int flags)
{
	struct sock *sock = message ? frames_get(fd) : NULL;
	struct msghdr to;
	struct known way;
	ssize_t result;

	forget_error();
	if (sock) {
		result = frames_sendmsg(fd, sock, message, flags);
		sock_put(sock);
		return result;
	}
	sock = message && message->msg_name ? sock_get(fd) : NULL;
	if (!sock)
		return REAL(sendmsg)(fd, message, flags);
	to = *message;
	to.msg_name = NULL;
	to.msg_namelen = 0;
	if (sock->type == SOCK_DGRAM && choose_way(fd, sock, message->msg_name, message->msg_namelen, &way)) {
		sock_put(sock);
		return -1;
	}
	if (sock->type == SOCK_DGRAM) {
		to.msg_name = &way.address;
		to.msg_namelen = way.length;
	}
	result = REAL(sendmsg)(fd, &to, flags);
	sock_put(sock);
	return result;
}

ssize_t sv_recvmsg(int fd, struct msghdr *message, int flags)
{
	struct sock *sock = message ? frames_get(fd) : NULL;
	struct sockaddr_storage from;
	struct sockaddr_sv asker;
	struct msghdr given;
	ssize_t got;

	forget_error();
	if (sock) {
		got = frames_recvmsg(fd, sock, message, flags);
		sock_put(sock);
		return got;
	}
	sock = message && message->msg_name && !(flags & MSG_ERRQUEUE) ? sock_get(fd) : NULL;
	if (!sock)
		return REAL(recvmsg)(fd, message, flags);
	given = *message;
	do {
		*message = given;
		message->msg_name = &from;
		message->msg_namelen = sizeof(from);
		got = REAL(recvmsg)(fd, message, flags);
	} while (got >= 0 && message->msg_namelen && !find_asker(fd, sock, &from, &asker));
	message->msg_name = given.msg_name;
	if (got >= 0 && message->msg_namelen) {
		message->msg_namelen = given.msg_namelen;
		address_write(&asker, given.msg_name, &message->msg_namelen);
	} else if (got < 0) {
		message->msg_namelen = given.msg_namelen;
	}
	sock_put(sock);
	return got;
}
