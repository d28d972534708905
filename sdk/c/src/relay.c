/* SPDX-License-Identifier: Apache-2.0
 *
 * Of the shim alone: which pairs of connections the program relays between by splice(2), and changes nothing, so that
 * it can leave. It counts for connections that were accepted at ports which the operator has named
 * (MARGAY_SPLICE_PORTS, set by `margay run --splice`): whoever speaks HTTP splices one body, and wants the next request
 * again. With MARGAY_SPLICE_WHEN (`--splice-when`) it stays until there is a file of this name.
 *
 * A direction is at rest when all that was read of one socket has been written to the other one. Of bytes that went
 * through a pipe this is so when the pipe is empty; a program splices when it has nothing else of that direction left
 * to write. Of bytes that it has read into its memory it is so when as many have been written, all in one piece, and
 * never more than were read. No call of another thread may be under way, since what it has done is not counted yet;
 * and the kernel must have given out as many bytes as were counted: others were read past the shim (stdio, memory that
 * is mapped onto a socket). When both directions are at rest, the agent is asked by the thread that has just emptied a
 * pipe; meanwhile it neither reads nor writes, and calls of other threads wait.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <linux/sockios.h>
#include <linux/tcp.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "internal.h"

/* Connections with higher numbers are not looked at. */
#define ENDS_MAX 65536
#define PORTS_MAX 64
/* A session that is not set up after so many questions is left alone. */
#define ASKED_MAX 64
/* Where the program still relays so long after the agent has agreed, the session's new way has not come to stand: the
 * agent is asked again. Each time the pause doubles.
 */
#define AGREED_AGAIN_MS 3000
#define AGREED_MAX 8
/* Of a TCP: the peer has sent its FIN. What names it does not go with linux/tcp.h. */
#define STATE_CLOSE_WAIT 8
/* A power of two. Of two pipes at one place the later one counts. */
#define PIPES_MAX 8192

struct end {
	atomic_uint generation; /* the descriptor was closed, or is another socket's */
	atomic_bool is_accepted; /* at a port that was named */
	atomic_uint asked; /* how often the agent was asked about it */
	atomic_uint agreed; /* how often the agent has agreed */
	atomic_llong again_ms; /* it is asked no earlier */
	atomic_bool is_cut; /* its last write was not taken whole */
	atomic_bool is_added_to; /* more was written than read on the other side */
	atomic_bool is_spliced; /* what was read last went into a pipe */
	atomic_ullong read, written; /* by way of the program's memory */
	atomic_ullong piped_in, piped_out; /* of what was read of it */
	atomic_int other; /* where it is written to, plus one; 0: not known */
	/* Calls that are under way. Of a thread that was cancelled in one it stays, and the agent is not asked. */
	atomic_int busy;
	atomic_ullong asking; /* the process and thread that ask the agent about it; 0: none */
};

struct pipe {
	atomic_ullong inode;
	atomic_int source; /* plus one */
	atomic_uint generation; /* of the source */
};

static struct end *ends;
static struct pipe *pipes;
static uint16_t ports[PORTS_MAX];
static size_t port_count;
static const char *when;

void relay_start(void)
{
	/* A program that has more rights than who started it gives no connection away. */
	const char *text = secure_getenv("MARGAY_SPLICE_PORTS");

	while (text && *text && port_count < PORTS_MAX) {
		char *end;
		unsigned long port = strtoul(text, &end, 10);

		if (end == text || port == 0 || port > UINT16_MAX)
			return;
		ports[port_count++] = (uint16_t)port;
		text = *end == ',' ? end + 1 : end;
	}
	if (!port_count)
		return;
	when = secure_getenv("MARGAY_SPLICE_WHEN");
	/* Pages that nobody touches cost nothing. */
	pipes = calloc(PIPES_MAX, sizeof(*pipes));
	if (pipes)
		ends = calloc(ENDS_MAX, sizeof(*ends));
}

static struct end *end_of(int fd)
{
	return ends && fd >= 0 && fd < ENDS_MAX ? &ends[fd] : NULL;
}

/* The same for a call of the program: a child of vfork does nothing to its parent's descriptors. */
static struct end *own_end_of(int fd)
{
	struct end *end = end_of(fd);

	return end && !table_is_borrowed() ? end : NULL;
}

/* A child of fork has not the thread that asks for its parent. */
static unsigned long long own_thread(void)
{
	return (unsigned long long)getpid() << 32 | (unsigned int)syscall(SYS_gettid);
}

static bool is_asked_by_another(const struct end *end)
{
	unsigned long long asking = end->asking, self;

	if (!asking)
		return false;
	self = own_thread();
	/* A handler of a signal may interrupt the very thread that asks. */
	return asking != self && asking >> 32 == self >> 32;
}

struct end *relay_begin(int fd)
{
	static const struct timespec a_while = {.tv_nsec = 200000};
	struct end *end = own_end_of(fd);

	if (!end)
		return NULL;
	atomic_fetch_add(&end->busy, 1);
	while (is_asked_by_another(end)) {
		atomic_fetch_sub(&end->busy, 1);
		/* The agent may be slow to answer, and the other thread of a lower priority. */
		nanosleep(&a_while, NULL);
		atomic_fetch_add(&end->busy, 1);
	}
	return end;
}

void relay_end(struct end *end)
{
	if (end)
		atomic_fetch_sub(&end->busy, 1);
}

void relay_forget_all(unsigned int first, unsigned int last)
{
	for (unsigned int fd = first; ends && fd <= last && fd < ENDS_MAX; fd++)
		if (ends[fd].is_accepted || ends[fd].read || ends[fd].piped_in || ends[fd].written || ends[fd].other)
			relay_forget((int)fd);
}

void relay_forget(int fd)
{
	struct end *end = own_end_of(fd);

	if (!end)
		return;
	atomic_fetch_add(&end->generation, 1);
	end->is_accepted = end->is_cut = end->is_added_to = end->is_spliced = false;
	end->asked = end->agreed = 0;
	end->again_ms = 0;
	end->read = end->written = end->piped_in = end->piped_out = 0;
	end->other = 0;
}

void relay_accepted(int fd)
{
	struct sockaddr_storage local;
	socklen_t length = sizeof(local);
	struct end *end = own_end_of(fd);
	uint16_t port;

	if (!end)
		return;
	relay_forget(fd);
	if (REAL(getsockname)(fd, (struct sockaddr *)&local, &length))
		return;
	if (local.ss_family == AF_INET)
		port = ntohs(((struct sockaddr_in *)&local)->sin_port);
	else if (local.ss_family == AF_INET6)
		port = ntohs(((struct sockaddr_in6 *)&local)->sin6_port);
	else
		return;
	for (size_t at = 0; at < port_count; at++)
		if (ports[at] == port)
			end->is_accepted = true;
}

void relay_read(struct end *end, ssize_t got)
{
	if (end && got > 0) {
		end->read += (unsigned long long)got;
		end->is_spliced = false;
	}
	relay_end(end);
}

void relay_written(struct end *end, size_t wanted, ssize_t done)
{
	if (!end)
		return;
	if (done > 0)
		end->written += (unsigned long long)done;
	if (done >= 0 || errno == EAGAIN || errno == EWOULDBLOCK)
		end->is_cut = done < 0 || (size_t)done < wanted;
	relay_end(end);
}

static struct pipe *pipe_of(int fd, unsigned long long *inode)
{
	struct stat about;

	if (fstat(fd, &about) || !S_ISFIFO(about.st_mode))
		return NULL;
	*inode = about.st_ino;
	return &pipes[about.st_ino % PIPES_MAX];
}

static void note_piped_in(int from, struct pipe *pipe, unsigned long long inode, size_t count)
{
	struct end *end = end_of(from);

	if (!end)
		return;
	end->piped_in += count;
	end->is_spliced = true;
	pipe->inode = inode;
	pipe->source = from + 1;
	pipe->generation = end->generation;
}

/* The socket whose bytes have just left a pipe; -1: not known. */
static int source_of(const struct pipe *pipe, unsigned long long inode, size_t count)
{
	int source = pipe->source - 1;
	struct end *end = end_of(source);

	if (!end || pipe->inode != inode || end->generation != pipe->generation)
		return -1;
	end->piped_out += count;
	return source;
}

/* Whether the kernel has given out as many bytes of a socket as were counted. What comes meanwhile makes it differ. */
static bool is_counted(int fd, const struct end *end)
{
	struct tcp_info info = { 0 };
	socklen_t length = sizeof(info);
	unsigned long long given;
	int waiting;

	if (ioctl(fd, SIOCINQ, &waiting) || getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &length))
		return false;
	given = info.tcpi_bytes_received - (unsigned int)waiting;
	/* A FIN is counted as a byte. */
	return given == end->read + end->piped_in + (info.tcpi_state == STATE_CLOSE_WAIT ? 1 : 0);
}

/* Whether all that was read of one has been written to the other. */
static bool is_at_rest(struct end *from, struct end *to)
{
	if (from->piped_in != from->piped_out)
		return false;
	if (from->is_spliced)
		return true;
	if (to->written > from->read)
		to->is_added_to = true;
	return !to->is_added_to && !to->is_cut && to->written == from->read;
}

/* Calls of other threads on both wait from here on, until both are released. False where one is under way, or another
 * thread asks.
 */
static bool hold(struct end *one, struct end *other)
{
	unsigned long long none = 0, self = own_thread();

	if (!atomic_compare_exchange_strong(&one->asking, &none, self))
		return false;
	none = 0;
	if (!atomic_compare_exchange_strong(&other->asking, &none, self)) {
		one->asking = 0;
		return false;
	}
	/* Either a call that begins sees that, or this sees the call. */
	if (!one->busy && !other->busy)
		return true;
	one->asking = other->asking = 0;
	return false;
}

static void release(struct end *one, struct end *other)
{
	one->asking = other->asking = 0;
}

/* Asks the agent to make one of two sessions, if both directions are at rest. */
static void ask(int source, int target)
{
	struct end *from = end_of(source), *to = end_of(target), *accepted = from->is_accepted ? from : to;
	bool is_unknown;

	if (!is_at_rest(from, to) || !is_at_rest(to, from) || (when && *when && access(when, F_OK)))
		return;
	if (now_ms() < accepted->again_ms || !is_counted(source, from) || !is_counted(target, to) ||
	    atomic_fetch_add(&accepted->asked, 1) >= ASKED_MAX)
		return;
	/* What the agent refuses stays as it is: the program relays on, and nothing is lost. A session that is not set
	 * up yet is asked about again, with later bytes; one that is being made one (EALREADY), later.
	 */
	if (!agent_splice(accepted == from ? source : target, accepted == from ? target : source, SPLICE_PROGRAM_RELAYS,
			  &is_unknown) ||
	    errno == EALREADY) {
		accepted->again_ms = now_ms() + (AGREED_AGAIN_MS << accepted->agreed);
		accepted->asked = ++accepted->agreed < AGREED_MAX ? 0 : ASKED_MAX;
	} else if (errno != EAGAIN) {
		accepted->asked = ASKED_MAX;
	}
	forget_error();
}

static void consider(int source, int target)
{
	struct end *from = end_of(source), *to = end_of(target);
	int error = errno, cancel;

	if (!from || !to)
		return;
	from->other = target + 1;
	/* Where the answer goes another way, or several are asked, there is no pair. */
	if (from->is_accepted == to->is_accepted || (to->other && to->other != source + 1))
		return;
	pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &cancel);
	if (hold(from, to)) {
		ask(source, target);
		release(from, to);
	}
	pthread_setcancelstate(cancel, NULL);
	errno = error;
}

void relay_spliced(struct end *from_end, struct end *to_end, int from, int to, ssize_t moved)
{
	unsigned long long inode;
	struct pipe *pipe = NULL;
	int source = -1, error = errno;

	if (!ends || table_is_borrowed())
		return;
	if (moved > 0) {
		pipe = pipe_of(to, &inode);
		if (pipe)
			note_piped_in(from, pipe, inode, (size_t)moved);
		else if ((pipe = pipe_of(from, &inode)))
			source = source_of(pipe, inode, (size_t)moved);
	}
	relay_end(from_end);
	relay_end(to_end);
	if (source >= 0)
		consider(source, to);
	errno = error;
}

void relay_file_sent(struct end *from_end, struct end *to_end, int from, int to, ssize_t moved)
{
	unsigned long long inode;
	int error = errno;

	if (to_end && moved > 0 && !pipe_of(from, &inode) && !pipe_of(to, &inode)) {
		/* The end of the file cuts nothing. */
		relay_written(to_end, (size_t)moved, moved);
		relay_end(from_end);
	} else {
		relay_spliced(from_end, to_end, from, to, moved);
	}
	errno = error;
}
