/* SPDX-License-Identifier: Apache-2.0
 *
 * Framed sockets against a process that speaks as "margay ensemble socket" does: this program itself, when it is called
 * so. It gives each frame back; "lose" is lost, and "end" is answered with an error.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

#include "margay.h"

#define CHECK(that)                                                                                                \
	do {                                                                                                       \
		if (!(that)) {                                                                                     \
			fprintf(stderr, "%s:%d: %s (errno: %s; %s)\n", __func__, __LINE__, #that, strerror(errno), \
				sv_strerror());                                                                    \
			exit(1);                                                                                   \
		}                                                                                                  \
	} while (0)

#define AS(address) ((struct sockaddr *)&(address)), sizeof(address)
#define HEAD_LEN 264
#define MIB (1 << 20)

/* The process: what comes and goes as the packets are laid out. */

static void tell(int fd, char kind, uint8_t number, const void *payload, size_t length, int passed)
{
	unsigned char head[HEAD_LEN] = { (unsigned char)kind, [7] = number };
	struct iovec parts[2] = { { head, sizeof(head) }, { (void *)payload, length } };
	union {
		struct cmsghdr header;
		char space[CMSG_SPACE(sizeof(int))];
	} control = { .header = { CMSG_LEN(sizeof(int)), SOL_SOCKET, SCM_RIGHTS } };
	struct msghdr message = { .msg_iov = parts, .msg_iovlen = 2 };

	if (passed >= 0) {
		memcpy(CMSG_DATA(&control.header), &passed, sizeof(passed));
		message.msg_control = &control;
		message.msg_controllen = sizeof(control);
	}
	CHECK(sendmsg(fd, &message, MSG_NOSIGNAL) == (ssize_t)(HEAD_LEN + length));
}

static int echo(int fd)
{
	static unsigned char packet[HEAD_LEN + 65536];
	union {
		struct cmsghdr header;
		char space[CMSG_SPACE(sizeof(int))];
	} control;
	struct iovec part = { packet, sizeof(packet) };
	struct msghdr message;
	ssize_t got;

	for (;;) {
		message = (struct msghdr){ .msg_iov = &part, .msg_iovlen = 1, .msg_control = &control,
					   .msg_controllen = sizeof(control) };
		got = recvmsg(fd, &message, 0);
		if (got <= 0)
			return 0;
		CHECK(got >= HEAD_LEN && packet[0] == 'S');
		if (got == HEAD_LEN + 4 && !memcmp(packet + HEAD_LEN, "lose", 4)) {
			tell(fd, 'L', 7, NULL, 0, -1);
			continue;
		}
		if (got == HEAD_LEN + 3 && !memcmp(packet + HEAD_LEN, "end", 3)) {
			tell(fd, 'E', ETIMEDOUT, "nobody answers", 14, -1);
			return 0;
		}
		packet[0] = 'F';
		part.iov_len = (size_t)got;
		CHECK(sendmsg(fd, &message, MSG_NOSIGNAL) == got);
		part.iov_len = sizeof(packet);
		if (message.msg_controllen) {
			int file;

			memcpy(&file, CMSG_DATA(CMSG_FIRSTHDR(&message)), sizeof(file));
			close(file);
		}
	}
}

/* As the process: ensemble socket VERB --as LABEL -- NAME. */
static int carry(char **words)
{
	static const char who[] = "sid:8877000000000000000000000000000000000000000000000000000000000001";
	int pair[2];

	/* Nothing that this program had open, and nothing of its signals. */
	CHECK(fcntl(3, F_GETFD) == -1 && !strcmp(words[2], "socket") && !strcmp(words[4], "--as") && !strcmp(words[6], "--"));
	if (strstr(words[7], "sid:dead")) {
		tell(0, 'E', ECONNREFUSED, "nobody is there", 15, -1);
		return 0;
	}
	if (strstr(words[7], "sid:0bad"))
		return 0;
	tell(0, 'O', 0, NULL, 0, -1);
	if (!strcmp(words[3], "connect"))
		return echo(0);
	CHECK(!socketpair(AF_UNIX, SOCK_SEQPACKET, 0, pair));
	tell(0, 'A', 0, who, sizeof(who) - 1, pair[0]);
	close(pair[0]);
	/* It takes no further ones. */
	close(0);
	tell(pair[1], 'F', 9, words[5], strlen(words[5]), -1);
	return echo(pair[1]);
}

static struct sockaddr_sv name_of(uint8_t first, uint8_t second)
{
	return (struct sockaddr_sv){ .sv_family = AF_SERVAL, .sv_srvid.s_sid = { first, second } };
}

static int connected(void)
{
	struct sockaddr_sv name = name_of(0x11, 0x22);
	int s = sv_socket(PF_SERVAL, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);

	CHECK(s >= 0 && !sv_connect(s, AS(name)));
	return s;
}

static void frames_go_and_come_whole(void)
{
	struct sv_frame frame = { .sf_order = 3, .sf_flags = SV_SAFE | SV_WANTS_ANSWER, .sf_key_length = 1, .sf_key = "k" };
	struct sockaddr_sv peer;
	socklen_t size = sizeof(peer);
	char data[64];
	int s = connected();

	CHECK(!sv_getpeername(s, (struct sockaddr *)&peer, &size) && peer.sv_srvid.s_sid[0] == 0x11);
	CHECK(sv_sendframe(s, "one", 3, &frame, 0) == 3 && frame.sf_number == 0);
	CHECK(sv_sendframe(s, "two", 3, &frame, 0) == 3 && frame.sf_number == 1);
	CHECK(sv_sendframe(s, "an answer", 9, &(struct sv_frame){ .sf_flags = SV_IS_ANSWER, .sf_number = 5 }, 0) == 9);
	CHECK(sv_sendframe(s, "three", 5, &frame, 0) == 5 && frame.sf_number == 2);
	memset(&frame, 0xff, sizeof(frame));
	CHECK(sv_recvframe(s, data, sizeof(data), &frame, 0) == 3 && !memcmp(data, "one", 3));
	CHECK(frame.sf_order == 3 && frame.sf_flags == (SV_SAFE | SV_WANTS_ANSWER));
	CHECK(frame.sf_key_length == 1 && frame.sf_key[0] == 'k');
	/* A frame that is longer than the room is one frame still. */
	CHECK(sv_recvframe(s, data, 1, &frame, MSG_PEEK | MSG_TRUNC) == 3 && frame.sf_flags & SV_CUT);
	CHECK(sv_recvframe(s, data, 2, &frame, 0) == 2 && !memcmp(data, "tw", 2) && frame.sf_flags & SV_CUT);
	CHECK(sv_recvframe(s, data, sizeof(data), &frame, 0) == 9 && frame.sf_flags == SV_IS_ANSWER && frame.sf_number == 5);
	CHECK(sv_recv(s, data, sizeof(data), 0) == 5 && !memcmp(data, "three", 5));
	/* An empty one is not the end. */
	CHECK(sv_send(s, "", 0, 0) == 0 && sv_recvframe(s, data, sizeof(data), &frame, 0) == 0 && !frame.sf_flags);
	CHECK(sv_send(s, "lose", 4, 0) == 4 && sv_recvframe(s, data, sizeof(data), &frame, 0) == 0);
	CHECK(frame.sf_flags == SV_LOST && frame.sf_number == 7);
	CHECK(sv_send(s, "lose", 4, 0) == 4 && sv_recv(s, data, sizeof(data), 0) == -1 && errno == EREMOTEIO);
	CHECK(sv_send(s, "end", 3, 0) == 3 && sv_recv(s, data, sizeof(data), 0) == -1 && errno == ETIMEDOUT);
	CHECK(!strcmp(sv_strerror(), "nobody answers"));
	CHECK(sv_recvframe(s, data, sizeof(data), &frame, 0) == 0 && frame.sf_flags == SV_END);
	CHECK(sv_send(s, "late", 4, MSG_NOSIGNAL) == -1 && errno == EPIPE);
	CHECK(!sv_close(s));
}

static void long_frames_and_frames_in_parts(void)
{
	static char large[8 * MIB], back[8 * MIB];
	struct iovec parts[2] = { { large, 1000 }, { large + 1000, 6 * MIB } };
	struct msghdr message = { .msg_iov = parts, .msg_iovlen = 2 };
	int s = connected();
	size_t lengths[] = { 65536, 65537, sizeof(large) };

	for (size_t at = 0; at < sizeof(large); at++)
		large[at] = (char)(at * 31 % 251);
	for (size_t at = 0; at < 3; at++) {
		memset(back, 0, sizeof(back));
		CHECK(sv_send(s, large, lengths[at], 0) == (ssize_t)lengths[at]);
		CHECK(sv_recv(s, back, sizeof(back), 0) == (ssize_t)lengths[at] && !memcmp(large, back, lengths[at]));
	}
	CHECK(sv_sendmsg(s, &message, 0) == 1000 + 6 * MIB);
	memset(back, 0, sizeof(back));
	parts[0] = (struct iovec){ back, 5 };
	parts[1] = (struct iovec){ back + 5, 1 * MIB };
	CHECK(sv_recvmsg(s, &message, 0) == 5 + MIB && !memcmp(large, back, 5 + MIB));
	CHECK(message.msg_flags == (MSG_EOR | MSG_TRUNC));
	CHECK(!sv_close(s));
}

/* Poll and MSG_DONTWAIT are those of the kernel, either way. */
static void who_does_not_wait(void)
{
	static char data[60000];
	struct pollfd ready;
	int s = connected(), copy, sent = 0, got = 0;

	ready = (struct pollfd){ .fd = s, .events = POLLIN };
	CHECK(sv_recv(s, data, sizeof(data), MSG_DONTWAIT) == -1 && errno == EAGAIN);
	CHECK(!fcntl(s, F_SETFL, O_NONBLOCK));
	/* The other end reads no more than fits its own answers. */
	while (sv_send(s, data, sizeof(data), 0) >= 0)
		sent++;
	CHECK(errno == EAGAIN && sent > 2);
	while (got < sent) {
		CHECK(poll(&ready, 1, 20000) == 1);
		got += sv_recv(s, data, sizeof(data), 0) == sizeof(data);
	}
	copy = sv_dup(s);
	CHECK(!sv_close(s) && sv_send(copy, "still", 5, 0) == 5);
	ready.fd = copy;
	CHECK(poll(&ready, 1, 20000) == 1 && sv_recv(copy, data, sizeof(data), 0) == 5 && !sv_close(copy));
}

static void *read_all(void *argument)
{
	int s = *(int *)argument;
	static char data[60000];

	for (int at = 0; at < 64; at++)
		CHECK(sv_recv(s, data, sizeof(data), 0) == sizeof(data));
	return NULL;
}

static void one_thread_sends_and_one_receives(void)
{
	static const char data[60000];
	pthread_t reader;
	int s = connected();

	CHECK(!pthread_create(&reader, NULL, read_all, &s));
	for (int at = 0; at < 64; at++)
		CHECK(sv_send(s, data, sizeof(data), 0) == sizeof(data));
	CHECK(!pthread_join(reader, NULL) && !sv_close(s));
}

static void a_connection_is_accepted(void)
{
	struct sockaddr_sv name = name_of(0x33, 0x44), client, local;
	struct sv_frame frame;
	socklen_t size = sizeof(client);
	char data[64];
	int s = sv_socket(PF_SERVAL, SOCK_SEQPACKET, 0), c;

	CHECK(sv_listen(s, 8) == -1 && errno == EDESTADDRREQ);
	CHECK(sv_accept(s, NULL, NULL) == -1 && errno == EINVAL);
	CHECK(!sv_bind(s, AS(name)) && sv_bind(s, AS(name)) == -1 && errno == EINVAL);
	CHECK(!sv_framelabel(s, "first") && !sv_listen(s, 8) && !sv_listen(s, 9));
	c = sv_accept4(s, (struct sockaddr *)&client, &size, SOCK_CLOEXEC | SOCK_NONBLOCK);
	CHECK(c >= 0 && size == sizeof(client) && client.sv_srvid.s_sid[0] == 0x88 && client.sv_srvid.s_sid[31] == 1);
	CHECK(fcntl(c, F_GETFD) & FD_CLOEXEC && fcntl(c, F_GETFL) & O_NONBLOCK);
	size = sizeof(local);
	CHECK(!sv_getsockname(c, (struct sockaddr *)&local, &size) && local.sv_srvid.s_sid[0] == 0x33);
	CHECK(sv_getpeername(s, (struct sockaddr *)&local, &size) == -1 && errno == ENOTCONN);
	CHECK(poll(&(struct pollfd){ .fd = c, .events = POLLIN }, 1, 20000) == 1);
	CHECK(sv_recvframe(c, data, sizeof(data), &frame, 0) == 5 && !memcmp(data, "first", 5) && frame.sf_number == 9);
	frame = (struct sv_frame){ .sf_flags = SV_IS_ANSWER, .sf_number = frame.sf_number };
	CHECK(sv_sendframe(c, "yes", 3, &frame, 0) == 3 && frame.sf_number == 9);
	CHECK(poll(&(struct pollfd){ .fd = c, .events = POLLIN }, 1, 20000) == 1);
	CHECK(sv_recvframe(c, data, sizeof(data), &frame, 0) == 3 && frame.sf_flags == SV_IS_ANSWER && frame.sf_number == 9);
	CHECK(sv_accept(s, NULL, NULL) == -1 && errno == ECONNABORTED);
	CHECK(!sv_close(c) && !sv_close(s));
}

static void what_is_wrong_is_said(void)
{
	struct sockaddr_sv refused = name_of(0xde, 0xad), odd = name_of(0x0b, 0xad);
	struct sv_frame frame = { .sf_order = 256 };
	static char large[8 * MIB + 1];
	char data[8];
	int s = sv_socket(PF_SERVAL, SOCK_SEQPACKET, 0);

	CHECK(sv_send(s, "x", 1, 0) == -1 && errno == ENOTCONN && sv_recv(s, data, 8, 0) == -1 && errno == ENOTCONN);
	CHECK(sv_connect(s, AS(refused)) == -1 && errno == ECONNREFUSED && !strcmp(sv_strerror(), "nobody is there"));
	CHECK(!sv_close(s));
	s = sv_socket(PF_SERVAL, SOCK_SEQPACKET, 0);
	CHECK(sv_connect(s, AS(odd)) == -1 && errno == EPROTO && !sv_close(s));
	CHECK(sv_socket(PF_SERVAL, SOCK_SEQPACKET, 6) == -1 && errno == EPROTONOSUPPORT);
	s = connected();
	CHECK(sv_connect(s, AS(refused)) == -1 && errno == EISCONN && sv_bind(s, AS(refused)) == -1 && errno == EINVAL);
	CHECK(sv_sendframe(s, "x", 1, &frame, 0) == -1 && errno == EINVAL);
	frame = (struct sv_frame){ .sf_flags = SV_LOST };
	CHECK(sv_sendframe(s, "x", 1, &frame, 0) == -1 && errno == EINVAL);
	CHECK(sv_send(s, large, sizeof(large), 0) == -1 && errno == EMSGSIZE);
	CHECK(sv_framelabel(s, "a label that is longer than the sixty-four bytes which it may have") == -1 && errno == EINVAL);
	CHECK(sv_sendframe(0, "x", 1, NULL, 0) == -1 && errno == ENOTSOCK);
	CHECK(sv_send(s, "fine", 4, 0) == 4 && sv_recv(s, data, sizeof(data), 0) == 4 && !sv_close(s));
	CHECK(!setenv("MARGAY_PROGRAM", "/nowhere/margay", 1));
	s = sv_socket(PF_SERVAL, SOCK_SEQPACKET, 0);
	CHECK(sv_connect(s, AS(refused)) == -1 && errno == ENOENT && strstr(sv_strerror(), "/nowhere/margay"));
	CHECK(!sv_close(s));
}

static volatile sig_atomic_t children;

static void on_child(int signal)
{
	(void)signal;
	children++;
}

/* A program that counts its children has none by this. */
static void nothing_is_seen_of_the_process(void)
{
	int s;

	signal(SIGCHLD, on_child);
	s = connected();
	CHECK(waitpid(-1, NULL, WNOHANG) == -1 && errno == ECHILD && !children);
	CHECK(!sv_close(s) && !children);
}

int main(int argc, char **argv)
{
	char self[PATH_MAX] = "";

	if (argc == 8 && !strcmp(argv[1], "ensemble"))
		return carry(argv);
	/* Whatever waits for something that does not come. */
	alarm(120);
	CHECK(readlink("/proc/self/exe", self, sizeof(self) - 1) > 0 && !setenv("MARGAY_PROGRAM", self, 1));
	/* The processes must not inherit it. */
	CHECK(fcntl(0, F_DUPFD, 3) == 3);
	nothing_is_seen_of_the_process();
	frames_go_and_come_whole();
	long_frames_and_frames_in_parts();
	who_does_not_wait();
	one_thread_sends_and_one_receives();
	a_connection_is_accepted();
	what_is_wrong_is_said();
	puts("frames: ok");
	return 0;
}
