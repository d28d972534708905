/* Serves a name with frames, alone or as a member of an ensemble: answers each with what it is called and the frame.
 *
 *   frames-server work-members.shop first
 */
#include <margay.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char *label = "";

static void *serve(void *argument)
{
	char *data = malloc(SV_FRAME_MAX), *answer = malloc(SV_FRAME_MAX + 80);
	int c = (int)(intptr_t)argument;
	struct sv_frame frame;
	ssize_t got;

	while (data && answer && (got = sv_recvframe(c, data, SV_FRAME_MAX, &frame, 0)) >= 0 && !(frame.sf_flags & SV_END)) {
		int begin = sprintf(answer, "%s: ", label);

		if (!(frame.sf_flags & SV_WANTS_ANSWER))
			continue;
		memcpy(answer + begin, data, (size_t)got);
		frame = (struct sv_frame){ .sf_flags = SV_IS_ANSWER, .sf_number = frame.sf_number };
		if (sv_sendframe(c, answer, (size_t)(begin + got), &frame, MSG_NOSIGNAL) < 0)
			break;
	}
	free(data);
	free(answer);
	sv_close(c);
	return NULL;
}

int main(int argc, char **argv)
{
	const char *written = argc > 1 ? argv[1] : "work.shop";
	struct sockaddr_sv name;
	pthread_t thread;
	int s, c;

	if (argc > 2)
		label = argv[2];
	s = sv_socket(PF_SERVAL, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
	if (s < 0 || sv_name(written, &name) || sv_framelabel(s, label) ||
	    sv_bind(s, (struct sockaddr *)&name, sizeof(name)) || sv_listen(s, 16)) {
		fprintf(stderr, "%s: %s\n", written, sv_strerror());
		return 1;
	}
	printf("serving %s\n", written);
	fflush(stdout);
	while ((c = sv_accept(s, NULL, NULL)) >= 0) {
		if (pthread_create(&thread, NULL, serve, (void *)(intptr_t)c))
			sv_close(c);
		else
			pthread_detach(thread);
	}
	fprintf(stderr, "%s: %s\n", written, sv_strerror());
	return 1;
}
