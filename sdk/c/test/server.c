/* SPDX-License-Identifier: Apache-2.0
 *
 * A server of AF_SERVAL, written as the paper's table 1 has it: under the shim as it stands, or with MARGAY_BSD_NAMES
 * against the library. It tells each client what it is called, and gives back what came.
 *
 *   server stream|datagram SID[/BITS] CLIENTS [poll|epoll|block|linger]
 *
 * "linger": it binds, and never listens.
 */
#include <poll.h>
#include <sys/epoll.h>
#include <unistd.h>

#include "margay.h"
#include "program.h"

static int await(int s, const char *how)
{
	struct pollfd wanted = { .fd = s, .events = POLLIN };
	struct epoll_event event = { .events = EPOLLIN };
	int epoll, ready;

	if (!strcmp(how, "poll")) {
		ready = poll(&wanted, 1, 20000);
		return count("poll", ready, ready == 1) == 1;
	}
	if (strcmp(how, "epoll"))
		return 1;
	epoll = epoll_create1(EPOLL_CLOEXEC);
	epoll_ctl(epoll, EPOLL_CTL_ADD, s, &event);
	ready = epoll_wait(epoll, &event, 1, 20000);
	close(epoll);
	return count("epoll_wait", ready, ready == 1) == 1;
}

static ssize_t answer_to(const struct sockaddr_sv *client, const char *data, ssize_t length, char *answer, size_t room)
{
	return snprintf(answer, room, "%s %.*s", written(client), (int)length, data);
}

static void serve_stream(int s, const char *how)
{
	char data[1024], answer[2048];
	struct sockaddr_sv client, again;
	socklen_t length = sizeof(client);
	ssize_t got, size;
	int c, result;

	c = accept(s, (struct sockaddr *)&client, &length);
	count("accept", c, c >= 0 && length == sizeof(client) && client.sv_family == AF_SERVAL);
	length = sizeof(again);
	result = getpeername(c, (struct sockaddr *)&again, &length);
	count("getpeername", result, result == 0 && is_same(&client, &again));
	while (await(c, how) && (got = recv(c, data, sizeof(data), 0)) > 0) {
		count("recv", got, true);
		size = answer_to(&client, data, got, answer, sizeof(answer));
		got = send(c, answer, (size_t)size, 0);
		count("send", got, got == size);
	}
	result = close(c);
	count("close", result, result == 0);
	printf("client %s\n", written(&client));
	fflush(stdout);
}

static void serve_datagram(int s, const char *how)
{
	char data[1024], answer[2048];
	struct sockaddr_sv client;
	socklen_t length = sizeof(client);
	ssize_t got, size;

	if (!await(s, how))
		return;
	got = recvfrom(s, data, sizeof(data), 0, (struct sockaddr *)&client, &length);
	count("recvfrom", got, got > 0 && length == sizeof(client) && client.sv_family == AF_SERVAL);
	size = answer_to(&client, data, got, answer, sizeof(answer));
	got = sendto(s, answer, (size_t)size, 0, (struct sockaddr *)&client, sizeof(client));
	count("sendto", got, got == size);
}

int main(int argc, char **argv)
{
	const char *how = argc > 4 ? argv[4] : "block";
	bool is_stream = argc > 3 && !strcmp(argv[1], "stream");
	struct sockaddr_sv name, local;
	socklen_t length = sizeof(local);
	int s, result;

	if (argc < 4)
		return 2;
	name = parse(argv[2]);
	s = socket(PF_SERVAL, is_stream ? SOCK_STREAM : SOCK_DGRAM, 0);
	count("socket", s, s >= 0);
	result = bind(s, (struct sockaddr *)&name, sizeof(name));
	count("bind", result, result == 0);
	if (result)
		return report("", "");
	result = getsockname(s, (struct sockaddr *)&local, &length);
	count("getsockname", result, result == 0 && is_same(&name, &local) && local.sv_prefix_bits == name.sv_prefix_bits);
	if (!strcmp(how, "linger")) {
		puts("bound");
		fflush(stdout);
		pause();
	}
	if (is_stream) {
		result = listen(s, 8);
		count("listen", result, result == 0);
	}
	puts("ready");
	fflush(stdout);
	for (int client = 0; client < atoi(argv[3]); client++) {
		if (is_stream)
			serve_stream(s, how);
		else
			serve_datagram(s, how);
	}
	result = close(s);
	count("close", result, result == 0);
	return report(written(&local), "");
}
