/* SPDX-License-Identifier: Apache-2.0
 *
 * Which descriptors are sockets of AF_SERVAL. Calls on others cost one look at memory, and no lock.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "internal.h"

#define CHUNK 1024
#define CHUNKS 1024

static _Atomic(_Atomic(struct sock *) *) chunks[CHUNKS];

static pid_t owner;

void table_adopt(void)
{
	owner = getpid();
}

bool table_is_borrowed(void)
{
	return getpid() != owner;
}

/* The place of a descriptor; NULL where there is none yet. */
static _Atomic(struct sock *) *place_of(int fd)
{
	_Atomic(struct sock *) *chunk;

	if (fd < 0 || fd >= CHUNK * CHUNKS)
		return NULL;
	chunk = atomic_load_explicit(&chunks[fd / CHUNK], memory_order_acquire);
	return chunk ? &chunk[fd % CHUNK] : NULL;
}

/* Under the lock. */
static void drop(struct sock *sock)
{
	if (!sock || --sock->references)
		return;
	free(sock->targets);
	free(sock->askers);
	free(sock);
}

struct sock *sock_get(int fd)
{
	_Atomic(struct sock *) *place = place_of(fd);
	struct section section;
	struct stat about;
	struct sock *found;

	if (!place || !atomic_load_explicit(place, memory_order_acquire))
		return NULL;
	section_enter(&section, &table_lock);
	found = atomic_load(place);
	if (found && (fstat(fd, &about) || about.st_ino != found->inode)) {
		/* It was closed by a call that we do not see. */
		if (!table_is_borrowed()) {
			atomic_store(place, NULL);
			drop(found);
		}
		found = NULL;
	}
	if (found)
		found->references++;
	section_leave(&section, &table_lock);
	return found;
}

void sock_put(struct sock *sock)
{
	struct section section;

	section_enter(&section, &table_lock);
	drop(sock);
	section_leave(&section, &table_lock);
}

/* Under the lock; takes over a reference. */
static int put_at(int fd, struct sock *sock)
{
	_Atomic(struct sock *) *chunk, *place;

	if (fd < 0 || fd >= CHUNK * CHUNKS)
		return -1;
	if (!place_of(fd)) {
		chunk = calloc(CHUNK, sizeof(*chunk));
		if (!chunk)
			return -1;
		atomic_store_explicit(&chunks[fd / CHUNK], chunk, memory_order_release);
	}
	place = place_of(fd);
	drop(atomic_exchange(place, sock));
	return 0;
}

int sock_add(int fd, int family, int type, struct sock **added)
{
	struct sock *sock = calloc(1, sizeof(*sock));
	struct section section;
	struct stat about;
	int result;

	if (!sock || fstat(fd, &about)) {
		free(sock);
		return fail(ENOMEM, "no memory for a socket");
	}
	*sock = (struct sock){ .references = 2, .inode = about.st_ino, .family = family, .type = type };
	section_enter(&section, &table_lock);
	result = put_at(fd, sock);
	section_leave(&section, &table_lock);
	if (result) {
		sock->references = 1;
		sock_put(sock);
		return fail(EMFILE, "descriptor %d is beyond those that sockets of AF_SERVAL may have", fd);
	}
	*added = sock;
	return 0;
}

void sock_copy(int from, int to)
{
	struct sock *sock = sock_get(from);
	struct section section;

	if (from == to || (sock && table_is_borrowed())) {
		if (sock)
			sock_put(sock);
		return;
	}
	if (!sock) {
		sock_remove(to);
		return;
	}
	/* The reference that was got is the new descriptor's. */
	section_enter(&section, &table_lock);
	if (put_at(to, sock))
		drop(sock);
	section_leave(&section, &table_lock);
}

void sock_remove(int fd)
{
	_Atomic(struct sock *) *place = place_of(fd);
	struct section section;

	if (!place || !atomic_load_explicit(place, memory_order_acquire) || table_is_borrowed())
		return;
	section_enter(&section, &table_lock);
	drop(atomic_exchange(place, NULL));
	section_leave(&section, &table_lock);
}
