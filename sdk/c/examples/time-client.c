/* Asks time.shop. See docs/book/programming.md. */
#include <margay.h>
#include <stdio.h>
#include <string.h>

int main(void)
{
	struct sockaddr_sv name;
	char line[64];
	ssize_t got;
	int s;

	s = sv_socket(PF_SERVAL, SOCK_STREAM, 0);
	if (s < 0 || sv_name("time.shop", &name)) {
		fprintf(stderr, "time.shop: %s\n", sv_strerror());
		return 1;
	}
	/* What the service or the network does is the kernel's to say, in errno. */
	if (sv_connect(s, (struct sockaddr *)&name, sizeof(name))) {
		perror("time.shop");
		return 1;
	}
	got = sv_recv(s, line, sizeof(line), 0);
	fwrite(line, 1, got > 0 ? (size_t)got : 0, stdout);
	return sv_close(s);
}
