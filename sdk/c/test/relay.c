/* SPDX-License-Identifier: Apache-2.0
 *
 * A program that relays between connections by splice(2), under the shim: when the agent is asked to make one of two.
 * The agent is a few lines of this program, and has an abstract name alone, as for programs in a root directory of
 * their own.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define CHECK(that)                                                                           \
	do {                                                                                  \
		if (!(that)) {                                                                \
			fprintf(stderr, "line %d: %s (%s)\n", __LINE__, #that, strerror(errno)); \
			exit(1);                                                              \
		}                                                                             \
	} while (0)

#define AS(address) ((struct sockaddr *)&(address)), sizeof(address)
#define SPLICE 75
#define REQUEST_LEN 56
#define REPLY_LEN 60

static const char *agent_name;
static atomic_int asked;
/* The agent answers so much later. */
static atomic_int slow_ms;
/* What came with the last question. */
static unsigned char request[400];
static ino_t passed[2];

/* The agent's socket, at which the first question may arrive before its thread runs. */
static int listen_as_agent(void)
{
	struct sockaddr_un address = { .sun_family = AF_UNIX };
	size_t length = strlen(agent_name);
	int listener = socket(AF_UNIX, SOCK_SEQPACKET, 0);

	memcpy(address.sun_path + 1, agent_name, length);
	CHECK(!bind(listener, (struct sockaddr *)&address,
		    (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + length)));
	CHECK(!listen(listener, 4));
	return listener;
}

static void *answer_all(void *listening)
{
	int listener = *(int *)listening, connection;
	union {
		struct cmsghdr header;
		char space[CMSG_SPACE(4 * sizeof(int))];
	} control;
	struct iovec part = { request, sizeof(request) };

	while ((connection = accept(listener, NULL, NULL)) >= 0) {
		for (;;) {
			struct msghdr message = {
				.msg_iov = &part,
				.msg_iovlen = 1,
				.msg_control = &control,
				.msg_controllen = sizeof(control),
			};
			unsigned char reply[REPLY_LEN] = { 1 };
			int fds[2];

			if (recvmsg(connection, &message, 0) < REQUEST_LEN)
				break;
			CHECK(CMSG_FIRSTHDR(&message) && CMSG_FIRSTHDR(&message)->cmsg_len == CMSG_LEN(sizeof(fds)));
			memcpy(fds, CMSG_DATA(CMSG_FIRSTHDR(&message)), sizeof(fds));
			for (int at = 0; at < 2; at++) {
				struct stat about;

				CHECK(!fstat(fds[at], &about));
				passed[at] = about.st_ino;
				close(fds[at]);
			}
			reply[1] = request[1];
			asked++;
			usleep((useconds_t)slow_ms * 1000);
			CHECK(send(connection, reply, sizeof(reply), 0) == sizeof(reply));
		}
		close(connection);
	}
	return NULL;
}

static ino_t inode_of(int fd)
{
	struct stat about;

	CHECK(!fstat(fd, &about));
	return about.st_ino;
}

static int listen_at(uint16_t port, uint16_t *got)
{
	struct sockaddr_in own = {
		.sin_family = AF_INET, .sin_port = htons(port), .sin_addr = { htonl(INADDR_LOOPBACK) }
	};
	socklen_t length = sizeof(own);
	int fd = socket(AF_INET, SOCK_STREAM, 0), on = 1;

	CHECK(!setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on)) && !bind(fd, AS(own)) && !listen(fd, 16));
	CHECK(!getsockname(fd, (struct sockaddr *)&own, &length));
	*got = ntohs(own.sin_port);
	return fd;
}

static int connect_to(uint16_t port)
{
	struct sockaddr_in to = {
		.sin_family = AF_INET, .sin_port = htons(port), .sin_addr = { htonl(INADDR_LOOPBACK) }
	};
	int fd = socket(AF_INET, SOCK_STREAM, 0);

	CHECK(fd >= 0 && !connect(fd, AS(to)));
	return fd;
}

/* A client, both sockets of a relay, and a server. */
struct chain {
	int client, left, right, server;
};

static struct chain chain(int proxy, uint16_t port, int upstream, uint16_t upstream_port)
{
	struct chain made = { .client = connect_to(port) };

	made.left = accept(proxy, NULL, NULL);
	made.right = connect_to(upstream_port);
	made.server = accept(upstream, NULL, NULL);
	CHECK(made.left >= 0 && made.server >= 0);
	return made;
}

static void end(struct chain chain)
{
	CHECK(!close(chain.client) && !close(chain.left) && !close(chain.right) && !close(chain.server));
}

static void say(int fd, const char *text)
{
	CHECK(send(fd, text, strlen(text), 0) == (ssize_t)strlen(text));
}

static void hear(int fd, const char *text)
{
	char heard[64] = "";

	CHECK(recv(fd, heard, strlen(text), MSG_WAITALL) == (ssize_t)strlen(text) && !strcmp(heard, text));
}

/* By way of the relay's memory. */
static void copy(int from, int to)
{
	char bytes[64];
	ssize_t got = recv(from, bytes, sizeof(bytes), 0);

	CHECK(got > 0 && send(to, bytes, (size_t)got, 0) == got);
}

/* By way of a pipe, of which so many bytes stay there. */
static void move(int from, int pipe[2], int to, size_t stay)
{
	ssize_t moved = splice(from, NULL, pipe[1], NULL, 4096, 0);

	CHECK(moved > (ssize_t)stay);
	CHECK(splice(pipe[0], NULL, to, NULL, (size_t)moved - stay, 0) == moved - (ssize_t)stay);
}

/* Another thread reads from a socket. */
struct reading {
	int fd;
	char bytes[64];
	atomic_bool has_begun, is_done;
};

static void *read_some(void *given)
{
	struct reading *reading = given;

	reading->has_begun = true;
	CHECK(recv(reading->fd, reading->bytes, sizeof(reading->bytes), 0) > 0);
	reading->is_done = true;
	return NULL;
}

static pthread_t begin_reading(struct reading *reading)
{
	pthread_t thread;

	CHECK(!pthread_create(&thread, NULL, read_some, reading));
	while (!reading->has_begun)
		sched_yield();
	usleep(20000);
	return thread;
}

/* As many bytes as there are in a text, by a call that takes several messages, or parts. */
static void take(int fd, char *text, size_t length, bool by_messages)
{
	struct iovec part = { text, length };
	struct mmsghdr message = { .msg_hdr = { .msg_iov = &part, .msg_iovlen = 1 } };

	if (by_messages)
		CHECK(recvmmsg(fd, &message, 1, 0, NULL) == 1 && message.msg_len == length);
	else
		CHECK(preadv2(fd, &part, 1, -1, 0) == (ssize_t)length);
}

/* The same for writing: several messages, parts, or a file. */
static void put(int fd, const char *text, size_t length, int kind)
{
	struct iovec part = { (void *)text, length };
	struct mmsghdr message = { .msg_hdr = { .msg_iov = &part, .msg_iovlen = 1 } };
	FILE *file;

	if (kind == 0) {
		CHECK(sendmmsg(fd, &message, 1, 0) == 1 && message.msg_len == length);
	} else if (kind == 1) {
		CHECK(pwritev2(fd, &part, 1, -1, 0) == (ssize_t)length);
	} else {
		file = tmpfile();
		CHECK(file && fwrite(text, 1, length, file) == length && !fflush(file));
		CHECK(sendfile(fd, fileno(file), &(off_t){ 0 }, length + 1) == (ssize_t)length);
		CHECK(!fclose(file));
	}
}

struct moving {
	struct chain chain;
	int *pipe;
};

static void *move_there(void *given)
{
	struct moving *moving = given;

	move(moving->chain.left, moving->pipe, moving->chain.right, 0);
	return NULL;
}

static int64_t now_ms(void)
{
	struct timespec now;

	CHECK(!clock_gettime(CLOCK_MONOTONIC, &now));
	return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

int main(int argc, char **argv)
{
	uint16_t port, upstream_port, other_port;
	int agent_listener, proxy, upstream, other, pipe_there[2], pipe_back[2];
	char text[16];
	int replaced;
	struct chain one, two;
	pthread_t agent;
	pid_t child;
	int64_t agreed_ms;
	struct reading reading;
	struct moving moving;
	pthread_t thread, second;
	FILE *stream;

	(void)argc;
	if (!getenv("MARGAY_SPLICE_PORTS")) {
		close(listen_at(0, &port));
		snprintf(text, sizeof(text), "1,%u", port);
		CHECK(!setenv("MARGAY_SPLICE_PORTS", text, 1));
		execv(argv[0], argv);
		CHECK(!"executed");
	}
	port = (uint16_t)atoi(strchr(getenv("MARGAY_SPLICE_PORTS"), ',') + 1);
	agent_name = getenv("MARGAY_PROGRAMS");
	proxy = listen_at(port, &port);
	upstream = listen_at(0, &upstream_port);
	other = listen_at(0, &other_port);
	CHECK(!pipe(pipe_there) && !pipe(pipe_back));
	agent_listener = listen_as_agent();
	CHECK(!pthread_create(&agent, NULL, answer_all, &agent_listener));

	/* A question by way of memory, its answer by a pipe: once the pipe is empty, and not before. */
	one = chain(proxy, port, upstream, upstream_port);
	say(one.client, "question");
	copy(one.left, one.right);
	hear(one.server, "question");
	say(one.server, "answer");
	move(one.right, pipe_back, one.left, 2);
	CHECK(asked == 0);
	agreed_ms = now_ms();
	CHECK(splice(pipe_back[0], NULL, one.left, NULL, 2, 0) == 2);
	hear(one.client, "answer");
	CHECK(asked == 1 && request[1] == SPLICE && request[2] == IPPROTO_TCP && request[4] == 0 && request[5] == 1);
	CHECK(passed[0] == inode_of(one.left) && passed[1] == inode_of(one.right));
	/* It goes on relaying, and is heard again when the new way should have come to stand long ago. */
	while (asked == 1) {
		say(one.server, "more");
		move(one.right, pipe_back, one.left, 0);
		hear(one.client, "more");
	}
	CHECK(now_ms() - agreed_ms >= 3000);
	CHECK(asked == 2 && passed[0] == inode_of(one.left) && passed[1] == inode_of(one.right));
	say(one.server, "more");
	move(one.right, pipe_back, one.left, 0);
	hear(one.client, "more");
	CHECK(asked == 2);
	end(one);

	/* The other way round, where the second one has said nothing; its descriptors are those of the one before. */
	one = chain(proxy, port, upstream, upstream_port);
	say(one.client, "upload");
	move(one.left, pipe_there, one.right, 0);
	hear(one.server, "upload");
	CHECK(asked == 3 && passed[0] == inode_of(one.left) && passed[1] == inode_of(one.right));
	end(one);

	/* A relay that adds bytes leaves when both directions go by pipes. */
	one = chain(proxy, port, upstream, upstream_port);
	say(one.right, "PROXY ");
	say(one.client, "question");
	copy(one.left, one.right);
	hear(one.server, "PROXY question");
	say(one.server, "answer");
	move(one.right, pipe_back, one.left, 0);
	hear(one.client, "answer");
	CHECK(asked == 3);
	say(one.client, "next");
	move(one.left, pipe_there, one.right, 0);
	hear(one.server, "next");
	CHECK(asked == 4);
	end(one);

	/* What was read and is not written yet keeps it. */
	one = chain(proxy, port, upstream, upstream_port);
	say(one.client, "question");
	CHECK(recv(one.left, text, 8, MSG_WAITALL) == 8 && send(one.right, text, 5, 0) == 5);
	say(one.server, "answer");
	move(one.right, pipe_back, one.left, 0);
	CHECK(asked == 4);
	CHECK(send(one.right, text + 5, 3, 0) == 3);
	say(one.server, "answer");
	move(one.right, pipe_back, one.left, 0);
	CHECK(asked == 5);
	end(one);

	/* What was only looked at is not read: other bytes in its place are added ones. */
	for (int by_message = 0; by_message < 2; by_message++) {
		struct iovec part = { text, 8 };
		struct msghdr message = { .msg_iov = &part, .msg_iovlen = 1 };

		one = chain(proxy, port, upstream, upstream_port);
		say(one.client, "question");
		CHECK((by_message ? recvmsg(one.left, &message, MSG_PEEK) :
				    recvfrom(one.left, text, 8, MSG_PEEK, NULL, NULL)) == 8);
		say(one.right, "question");
		say(one.server, "answer");
		move(one.right, pipe_back, one.left, 0);
		CHECK(asked == 5);
		end(one);
	}

	/* A child of vfork closes copies of its own. */
	one = chain(proxy, port, upstream, upstream_port);
	say(one.client, "question");
	copy(one.left, one.right);
	child = vfork();
	if (!child) {
		close(one.left);
		close(one.right);
		_exit(0);
	}
	CHECK(child > 0 && waitpid(child, NULL, 0) == child);
	say(one.server, "answer");
	move(one.right, pipe_back, one.left, 0);
	CHECK(asked == 6);
	end(one);

	/* A descriptor that was accepted at a named port, and is another connection's now. */
	one = chain(proxy, port, upstream, upstream_port);
	replaced = one.left;
	two = chain(other, other_port, upstream, upstream_port);
	CHECK(dup2(two.left, replaced) == replaced);
	say(two.client, "upload");
	move(replaced, pipe_there, two.right, 0);
	hear(two.server, "upload");
	CHECK(asked == 6);
	end(one);
	end(two);

	/* A port that was not named. */
	one = chain(other, other_port, upstream, upstream_port);
	say(one.client, "upload");
	move(one.left, pipe_there, one.right, 0);
	hear(one.server, "upload");
	CHECK(asked == 6);
	end(one);

	/* What was read by a call of another kind is in memory still. */
	for (int by_messages = 0; by_messages < 2; by_messages++) {
		one = chain(proxy, port, upstream, upstream_port);
		say(one.client, "question");
		take(one.left, text, 8, by_messages);
		say(one.server, "answer");
		move(one.right, pipe_back, one.left, 0);
		CHECK(asked == 6 + by_messages);
		CHECK(send(one.right, text, 8, 0) == 8);
		say(one.server, "answer");
		move(one.right, pipe_back, one.left, 0);
		CHECK(asked == 7 + by_messages);
		end(one);
	}

	/* What was written by a call of another kind is counted: bytes of memory, or others that were added. */
	for (int kind = 0; kind < 3; kind++) {
		for (int is_added = 0; is_added < 2; is_added++) {
			one = chain(proxy, port, upstream, upstream_port);
			say(one.client, "question");
			CHECK(recv(one.left, text, 8, MSG_WAITALL) == 8);
			put(one.right, "question", 8, kind);
			if (is_added)
				put(one.right, "more", 4, kind);
			say(one.server, "answer");
			move(one.right, pipe_back, one.left, 0);
			CHECK(asked == 9 + kind);
			end(one);
		}
	}
	asked -= 3;

	/* What was read past the shim is so, too. */
	one = chain(proxy, port, upstream, upstream_port);
	stream = fdopen(dup(one.left), "r");
	say(one.client, "questionrest");
	CHECK(stream && fread(text, 1, 8, stream) == 8 && send(one.right, text, 8, 0) == 8);
	say(one.client, "next");
	move(one.left, pipe_there, one.right, 0);
	CHECK(asked == 8);
	CHECK(!fclose(stream));
	end(one);

	/* Another thread reads. */
	one = chain(proxy, port, upstream, upstream_port);
	reading = (struct reading){ .fd = one.right };
	thread = begin_reading(&reading);
	say(one.client, "upload");
	move(one.left, pipe_there, one.right, 0);
	CHECK(asked == 8);
	say(one.server, "answer");
	CHECK(!pthread_join(thread, NULL) && send(one.left, reading.bytes, 6, 0) == 6);
	say(one.client, "upload");
	move(one.left, pipe_there, one.right, 0);
	CHECK(asked == 9);
	end(one);

	/* Another thread begins to read while the agent is asked. */
	one = chain(proxy, port, upstream, upstream_port);
	slow_ms = 300;
	moving = (struct moving){ .chain = one, .pipe = pipe_there };
	say(one.client, "upload");
	CHECK(!pthread_create(&thread, NULL, move_there, &moving));
	while (asked == 9)
		sched_yield();
	say(one.server, "answer");
	reading = (struct reading){ .fd = one.right };
	second = begin_reading(&reading);
	usleep(50000);
	CHECK(!reading.is_done);
	CHECK(!pthread_join(thread, NULL) && !pthread_join(second, NULL) && !memcmp(reading.bytes, "answer", 6));
	slow_ms = 0;
	end(one);

	/* Descriptors that were closed by their range are another connection's. */
	one = chain(proxy, port, upstream, upstream_port);
	say(one.client, "question");
	copy(one.left, one.right);
	replaced = one.left;
	CHECK(!close_range((unsigned int)one.left, (unsigned int)one.left, 0));
	CHECK(syscall(SYS_dup3, other, replaced, 0) == replaced);
	two = chain(other, other_port, upstream, upstream_port);
	CHECK(syscall(SYS_dup3, two.left, replaced, 0) == replaced);
	say(two.client, "upload");
	move(replaced, pipe_there, two.right, 0);
	hear(two.server, "upload");
	CHECK(asked == 10);
	puts("relay: ok");
	return 0;
}
